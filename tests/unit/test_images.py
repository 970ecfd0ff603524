"""A staged version on its way into an engine's parameters: whole, in parts, and broken off in the middle."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from milkweed.errors import TransferError
from milkweed.rollout.images import ParameterImage
from milkweed.rollout.sglang_hooks import _load, _Operation
from milkweed.transfer.manifest import Staged
from milkweed.transfer.packing import GrantedSlots, Packing
from milkweed.transfer.plan import EngineLayout, Parameter, Piece, RankLayout
from milkweed.transfer.puller import Puller
from milkweed.types import PolicyVersion

SHAPES = {f"w{i}": (700 + i, 1000) for i in range(8)}


def layout() -> EngineLayout:
    parameters, at = [], 0
    for name, shape in SHAPES.items():
        parameters.append(Parameter(name, "float32", shape, at, shape[0] * shape[1] * 4))
        at += -(-parameters[-1].nbytes // 64) * 64
    pieces = [Piece(n, (0, 0), s, i, 0, (s[1], 1)) for i, (n, s) in enumerate(SHAPES.items())]
    return EngineLayout(dict(SHAPES), [RankLayout(parameters, pieces, at)])


class Rig:
    """A puller's slots, and a scheduler of which only what `_load` touches is there."""

    def __init__(self, token: str) -> None:
        self.puller = Puller(token)
        self.parameters = {n: torch.zeros(s) for n, s in SHAPES.items()}
        self.live = ParameterImage(layout(), 0, self.parameters)
        self.model = SimpleNamespace(named_parameters=lambda remove_duplicate=True: self.parameters.items())
        self.sessions: list[str] = []
        updater = SimpleNamespace(
            begin_weight_update=lambda: self.sessions.append("begin"),
            end_weight_update=lambda run_post_load: self.sessions.append("end"),
        )
        runners = [(None, SimpleNamespace(weight_updater=updater))]
        self.scheduler = SimpleNamespace(weight_updater=SimpleNamespace(_select_runners=lambda: runners))

    def place(self, step: int, values: dict[str, torch.Tensor]) -> Staged:
        packing = Packing(layout(), [(n, (0, 0), s) for n, s in SHAPES.items()])
        grant = self.puller.grant(packing.target.nbytes, packing.target.layout)
        packing.place(list(values.values()), GrantedSlots().open(grant))
        staged = Staged(
            version=PolicyVersion(0, step), path=grant.path, offset=grant.offset, nbytes=grant.nbytes, digest=0, tensors=[],
            layout=packing.target.layout, stamp=grant.stamp,
        )  # fmt: skip
        self.puller.stage(staged)
        return staged

    def load(self, staged: Staged, fault: str = "", ranges=None) -> None:
        filling = self.live.filling(self.live.check(staged, self.model), ranges)
        _load(self.scheduler, filling, _Operation(self.scheduler, fault), "copy")


@pytest.fixture
def rig():
    made = Rig("images-test")
    yield made
    made.puller.close()


def random(seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=make) for n, s in SHAPES.items()}


def test_every_parameter_gets_the_versions_values(rig):
    values = random(1)
    rig.load(rig.place(1, values))
    assert all(torch.equal(rig.parameters[n], t) for n, t in values.items()) and rig.sessions == ["begin", "end"]


def test_only_the_ranges_named_are_copied(rig):
    values = random(1)
    staged = rig.place(1, values)
    second = layout().ranks[0].parameters[1]
    rig.load(staged, ranges=[(second.offset + 400, 8)])
    changed = {n: t.nonzero().tolist() for n, t in rig.parameters.items() if t.any()}
    assert changed == {"w1": [[0, 100], [0, 101]]} and rig.parameters["w1"][0, 100] == values["w1"][0, 100]


def test_a_copy_that_breaks_off_has_changed_some_parameters_and_the_version_before_mends_them(rig):
    before, after = random(1), random(2)
    old = rig.place(1, before)
    rig.load(old)
    new = rig.place(2, after)
    with pytest.raises(RuntimeError, match="fault injected"):
        rig.load(new, fault="copy")
    took = [n for n, t in after.items() if torch.equal(rig.parameters[n], t)]
    assert took == list(SHAPES)[:5]
    rig.load(old)
    assert all(torch.equal(rig.parameters[n], t) for n, t in before.items())


def test_a_slot_given_away_while_it_is_copied_is_noticed(rig):
    staged = rig.place(1, random(1))
    filling = rig.live.filling(rig.live.check(staged, rig.model))
    list(filling.parts())
    rig.puller._slots.find(staged.version).new_stamp()
    with pytest.raises(TransferError, match="overwritten"):
        filling.check()
    with pytest.raises(TransferError, match="overwritten"):
        rig.load(staged)
