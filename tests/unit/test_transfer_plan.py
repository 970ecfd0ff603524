"""The plan: traced layouts, moves for any cut, their packed form, and predictions for shapes of any size."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

from milkweed.cli import main as milkweed
from milkweed.errors import ConfigError, TransferError
from milkweed.transfer.packing import Packing
from milkweed.transfer.plan import EngineLayout, check_complete, moves
from milkweed.transfer.predict import Degrees, boxes, predict
from milkweed.transfer.tracing import trace

SHAPES = {
    "embed": (50, 8), "q_proj.weight": (8, 8), "k_proj.weight": (4, 8), "o_proj.weight": (8, 8), "norm.weight": (8,),
    "mlp.experts.0.down_proj.weight": (8, 6), "mlp.experts.1.down_proj.weight": (8, 6),
}  # fmt: skip


class Engine(nn.Module):
    """A made-up engine rank: fused, sliced, padded, stacked, transposed and replicated parameters."""

    def __init__(self, rank: int, degree: int, dtype=torch.float32) -> None:
        super().__init__()
        self.rank, self.degree = rank, degree
        rows = -(-50 // degree // 8) * 8 + 8
        shapes = {
            "embed": (rows, 8), "qkv": (12 // degree, 8), "o": (8, 8 // degree), "norm": (8,), "w2": (2, 8, 6 // degree),
            "turned": (8, 8),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load(self, weights) -> None:
        r, n = self.rank, self.degree
        for name, w in weights:
            if name == "embed":
                own = w[r * self.embed.shape[0] : (r + 1) * self.embed.shape[0]]
                self.embed.data[: own.shape[0]].copy_(own)
                self.embed.data[own.shape[0] :].fill_(0)
            elif name.startswith("q"):
                self.qkv.data.narrow(0, 0, 8 // n).copy_(w.narrow(0, r * 8 // n, 8 // n))
                self.turned.data.copy_(w.t())
            elif name.startswith("k"):
                self.qkv.data.narrow(0, 8 // n, 4 // n).copy_(w.view(2, 2, 8).flatten(0, 1)[r * 4 // n : (r + 1) * 4 // n])
            elif name.startswith("o"):
                self.o.data.copy_(w[:, r * 8 // n : (r + 1) * 8 // n].contiguous() if n == 1 else w.chunk(n, 1)[r])
            elif name.startswith("norm"):
                self.norm.data.copy_(w)
            else:
                expert = int(name.split(".")[2])
                self.w2.data[expert].copy_(w.narrow(1, r * 6 // n, 6 // n))


def layout_of(degree: int, dtype=torch.float32) -> EngineLayout:
    made = [Engine(r, degree, dtype) for r in range(degree)]
    return EngineLayout(SHAPES, [trace(e.load, e.named_parameters(), SHAPES)[0] for e in made])


def truth(degree: int, weights, layout: EngineLayout, dtype=torch.float32) -> np.ndarray:
    image = np.zeros(layout.nbytes, np.uint8)
    for r, start in enumerate(layout.starts[:-1]):
        engine = Engine(r, degree, dtype)
        engine.load(weights.items())
        for p in layout.ranks[r].parameters:
            raw = getattr(engine, p.name).detach().reshape(-1).view(torch.uint8).numpy()
            image[start + p.offset : start + p.offset + p.nbytes] = raw
    return image


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=g) for n, s in SHAPES.items()}


def held(values, own):
    return [values[n][tuple(slice(a, a + m) for a, m in zip(o, s, strict=True))].contiguous() for n, o, s in own]


CUTS = ["", "fsdp2", "fsdp3", "fsdp16", "tp2", "fsdp2,tp2", "fsdp3,tp2", "hsdp2x2"]


@pytest.mark.parametrize(("degree", "cut"), list(itertools.product((1, 2), CUTS)))
def test_any_cut_of_the_trainer_fills_what_the_loader_fills(degree, cut):
    layout, values = layout_of(degree), weights()
    layout.check()
    ranks = boxes(SHAPES, Degrees.parse(cut))
    check_complete(layout, ranks)
    slot = np.zeros(layout.nbytes, np.uint8)
    for own in ranks:
        Packing(layout, own).place(held(values, own), slot)
    assert (slot == truth(degree, values, layout)).all()


@pytest.mark.parametrize(("degree", "cut"), list(itertools.product((1, 2), CUTS)))
def test_the_packed_form_holds_the_same_bytes(degree, cut):
    layout, values = layout_of(degree), weights()
    slot, payload = np.zeros(layout.nbytes, np.uint8), 0
    for own in boxes(SHAPES, Degrees.parse(cut)):
        packing = Packing(layout, own)
        out = np.full(packing.nbytes, 255, np.uint8)
        packing.pack(held(values, own), out)
        for r in packing.regions:
            piece = out[r.offset : r.offset + r.nbytes]
            if not r.row_bytes:
                slot[r.to : r.to + r.nbytes] = piece
            for i in range(r.nbytes // r.row_bytes if r.row_bytes else 0):
                slot[r.to + i * r.step :][: r.row_bytes] = piece[i * r.row_bytes : (i + 1) * r.row_bytes]
        assert sum(n for _, n in packing.chunks) == sum(r.nbytes for r in packing.regions)
        payload += packing.payload
    assert payload == Packing(layout, []).target.payload
    assert (slot == truth(degree, values, layout)).all()


def test_a_smaller_dtype_is_cast_on_the_way():
    layout, values = layout_of(2), weights()
    own = boxes(SHAPES, Degrees())[0]
    packing = Packing(layout, own, "bfloat16")
    sent = layout.as_dtype("bfloat16")
    slot = np.zeros(sent.nbytes, np.uint8)
    packing.place(held(values, own), slot)
    assert (slot == truth(2, values, sent, torch.bfloat16)).all()


def test_an_engine_in_bfloat16_gets_bfloat16():
    layout, values = layout_of(2, torch.bfloat16), weights()
    own = boxes(SHAPES, Degrees())[0]
    slot = np.zeros(layout.nbytes, np.uint8)
    Packing(layout, own).place(held(values, own), slot)
    assert (slot == truth(2, values, layout, torch.bfloat16)).all()


def test_tracing_changes_nothing_and_sees_what_is_not_a_copy():
    engine = Engine(0, 1)
    engine.norm.data.fill_(7)
    trace(engine.load, engine.named_parameters(), SHAPES)
    assert (engine.norm == 7).all() and (engine.embed == 0).all()
    with pytest.raises(TransferError, match="tensor norm.weight goes through aten.mul"):
        trace(lambda ws: [engine.norm.data.copy_(w * 2) for n, w in ws if n == "norm.weight"], engine.named_parameters(), SHAPES)
    with pytest.raises(TransferError, match="fills parameter embed from none"):
        trace(lambda ws: None, engine.named_parameters(), SHAPES)


def test_a_gap_or_an_overlap_names_the_tensor():
    layout, own = layout_of(1), boxes(SHAPES, Degrees())[0]
    with pytest.raises(TransferError, match="tensor embed"):
        check_complete(layout, [[b for b in own if b[0] != "embed"]])
    with pytest.raises(TransferError, match="each must come from exactly one"):
        check_complete(layout, [own, own])
    with pytest.raises(TransferError, match="no tensor other"):
        moves(layout, [("other", (0,), (1,))])


@pytest.mark.parametrize(("degree", "cut"), list(itertools.product((1, 2), CUTS)))
def test_a_prediction_counts_what_the_plan_moves(degree, cut):
    layout, degrees = layout_of(degree), Degrees.parse(cut)
    found = predict(layout, degrees)
    for rank, own in enumerate(boxes(SHAPES, degrees)):
        sent = [0] * degree
        for m in moves(layout, own):
            sent[next(i for i, end in enumerate(layout.starts[1:]) if m.to < end)] += m.nbytes
        assert found.links[rank] == sent
    assert sum(map(sum, found.links)) == found.engine_bytes


def test_degrees_that_are_none_are_refused():
    assert Degrees.parse("hsdp2x64,tp8").ranks == 1024
    for text in ("fsdp0", "pp2", "fsdp"):
        with pytest.raises(ConfigError, match="is none of"):
            Degrees.parse(text)


def test_the_command_says_what_is_wrong(capsys, tmp_path):
    assert milkweed(["plan", "--model", str(tmp_path), "--engines", "two"]) == 1
    assert "not like 64xtp8" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert milkweed(["plan", "--model", str(tmp_path)]) == 1
    assert "bert" in capsys.readouterr().err
