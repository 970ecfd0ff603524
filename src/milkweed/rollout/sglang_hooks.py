"""Milkweed inside SGLang's schedulers: the plugin that commits a staged version of the weights between two steps.

Read from SGLang 0.5.23. One operation on every tensor-parallel rank: check, agree, retract what runs (its KV is of the
old weights), flush the prefix cache before anything is copied, copy, record the version, go on. No token is sampled
from a mixture of versions, and every retracted request is prefilled again under the new weights.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from milkweed.rollout import sglang_kv, sglang_pairs

METHOD = "milkweed_commit"
LAYOUT = "milkweed_layout"
FAULTS = "MILKWEED_FAULTS"
"""Where set, a commit may be told to fail in a part of it, so that tests see a real roll-back."""


def register() -> None:
    """SGLang's plugin entry point: called in every process of every engine on the machine, ours or not."""
    if os.environ.get("MILKWEED_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("MILKWEED_TOKEN"):
        # a killed engine leaves this file behind; under the fleet's name it is swept
        HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", _shm_path, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.handle_rpc_request", _on_rpc, HookType.AROUND)
    sglang_kv.register(HookRegistry, HookType)
    sglang_pairs.register(HookRegistry, HookType)
    streamer = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
    HookRegistry.register(streamer, _accept, HookType.AROUND)


def _accept(original: Callable[..., Any], batch: Any, *, req: Any) -> None:
    """SGLang says the versions of a request's tokens once it has finished; with this, of those it streams too."""
    before = len(batch.rids)
    original(batch, req=req)
    if len(batch.rids) > before and batch.weight_versions[-1] is None:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans

        batch.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=batch.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )


def _shm_path(ipc_name: str) -> str:
    import hashlib

    digest = hashlib.blake2s(ipc_name.encode(), digest_size=6).hexdigest()
    return f"/dev/shm/mw-{os.environ['MILKWEED_TOKEN']}-loads-{digest}"


def _on_rpc(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    hooks: dict[str, Callable[..., dict[str, Any]]] = {METHOD: commit, LAYOUT: layout, sglang_kv.SETTLE: settle}
    hook = hooks.get(request.method)
    if hook is None:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import RpcReqOutput

    parameters = dict(request.parameters or {})
    nonce = parameters.pop("nonce", "")
    outcome = hook(scheduler, **parameters)
    return RpcReqOutput(success=outcome["ok"], message=json.dumps(outcome | {"nonce": nonce}))


def layout(scheduler: Any, tensors: str) -> dict[str, Any]:
    """How the parameters of all ranks lie in memory, traced; from then on versions laid out so can be committed.
    `tensors` are the names and shapes of the model's Hugging Face tensors, as JSON. Never raises.

    Returns `ok`, `message` and `layout` (an EngineLayout as MessagePack, in base64)."""
    import base64

    import msgspec
    import torch.distributed as dist

    from milkweed.rollout.images import ParameterImage
    from milkweed.rollout.sglang_layout import live_layout
    from milkweed.transfer.plan import EngineLayout, RankLayout

    run, own, ranks = _Operation(scheduler, ""), [], []
    shapes = msgspec.json.decode(tensors, type=dict[str, tuple[int, ...]])
    if not run.step("trace", lambda: own.append(live_layout(scheduler, shapes))):
        return {"ok": False, "message": run.error, "parts": run.parts}
    rank_layout, parameters = own[0]
    group = scheduler.tp_group.cpu_group
    ranks = [msgspec.msgpack.encode(rank_layout)] * dist.get_world_size(group)
    if len(ranks) > 1:
        dist.all_gather_object(ranks, ranks[0], group=group)
    whole = EngineLayout(shapes, [msgspec.msgpack.decode(r, type=RankLayout) for r in ranks])
    scheduler._milkweed_image = ParameterImage(whole, dist.get_rank(group), parameters)
    raw = base64.b64encode(msgspec.msgpack.encode(whole)).decode() if dist.get_rank(group) == 0 else ""
    return {"ok": True, "message": "", "layout": raw, "parts": run.parts}


def settle(scheduler: Any, within_s: float) -> dict[str, Any]:
    """What was computed is written below the engine, as far as `within_s` seconds suffice. Never raises."""
    run = _Operation(scheduler, "")
    missing: list[str] = []
    ok = run.step("settle", lambda: missing.append(sglang_kv.settle(scheduler, run.agree, within_s)))
    return {"ok": ok and not missing[0], "message": run.error or missing[0], "parts": run.parts}


def commit(
    scheduler: Any, staged: str, previous: str, folder: str, version: str, head: bool, fault: str = "",
    changed_only: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Makes the `staged` version (a Staged as JSON) the one that `scheduler` serves. `previous` (JSON, or "" for the
    model folder's own weights) is rolled back to when the copy fails. `head` tells whether the model has a head of
    its own. Never raises: a scheduler that raises kills its engine.

    Returns `ok`, `state` ("serving" or "broken"), `message`, `retracted` and `parts` (ms)."""
    run = _Operation(scheduler, fault if os.environ.get(FAULTS) else "")
    new: list[Any] = []

    def prepare() -> None:
        if reason := _refusal(scheduler):
            raise RuntimeError(reason)
        new.append(_source(scheduler, staged, head, changed_only))

    if not run.step("prepare", prepare):
        # a broken engine stays broken: nothing was mended
        state = "broken" if _broken(scheduler) else "serving"
        return run.outcome(False, state, f"refused, nothing changed: {run.error}")
    still = sglang_kv.Still(scheduler)
    still.begin()
    try:
        return _exchange(scheduler, run, new[0], lambda: _before(scheduler, previous, folder, head), version, still)
    finally:
        still.end()


def _exchange(
    scheduler: Any, run: _Operation, new: Any, before: Callable[[], Any], version: str, still: sglang_kv.Still
) -> dict[str, Any]:
    was_paused = scheduler._engine_paused and not _broken(scheduler)
    retracted = len(scheduler.running_batch.reqs)
    if not run.step("retract", lambda: _pause(scheduler)):
        scheduler._milkweed_broken = True
        return run.outcome(False, "broken", f"the scheduler could not be stopped: {run.error}", retracted)
    state, message, ok = "serving", "", False
    if not run.step("drain", lambda: still.drain(run.agree)) or not run.step("flush", lambda: _flush(scheduler)):
        state = "broken" if run.agree("broken" if _broken(scheduler) else "") else "serving"
        message = f"not idle after retracting, nothing changed: {run.error}"
    elif run.step("copy", lambda: _load(scheduler, new, run, "copy")):
        scheduler.record_weight_version_change(version)
        if not run.step("salt", lambda: still.serve(version)):
            message = f"KV below the engine may be lost: {run.error}"  # not mistaken: its keys have the version
        ok = True
    else:
        cause = run.error
        if run.step("roll back", lambda: _load(scheduler, before(), run, "roll back")):
            message = f"rolled back to the version before: {cause}"
        else:
            state, message = "broken", f"left paused, neither version is whole: {cause}; roll-back: {run.error}"
    scheduler._milkweed_broken = state == "broken"
    if state == "serving" and not was_paused:
        run.step("continue", lambda: _continue(scheduler))
    return run.outcome(ok, state, message, retracted)


class _Operation:
    """The parts of one commit: each is timed, and each is done on all ranks or fails on all."""

    def __init__(self, scheduler: Any, fault: str) -> None:
        self.scheduler, self.fault = scheduler, fault.split(",")
        self.parts: dict[str, float] = {}
        self.error = ""

    def step(self, name: str, do: Callable[[], Any]) -> bool:
        start, error = time.perf_counter(), ""
        try:
            if name == "prepare" and name in self.fault:
                raise RuntimeError("fault injected")
            do()
        except Exception as e:  # whatever it is, it is told to the other ranks and to the caller
            error = f"{type(e).__name__}: {e}"
        try:
            self.error = self.agree(error)
        except Exception as e:
            self.error = f"{error} (and the ranks could not agree: {e})"
        self.parts[name] = round((time.perf_counter() - start) * 1e3, 3)
        return not self.error

    def agree(self, error: str) -> str:
        """The same answer on every tensor-parallel rank: what failed on any of them."""
        import torch.distributed as dist

        group = self.scheduler.tp_group.cpu_group
        size = dist.get_world_size(group)
        if size == 1:
            return error
        errors: list[Any] = [None] * size
        dist.all_gather_object(errors, error, group=group)
        return "; ".join(f"rank {i}: {e}" for i, e in enumerate(errors) if e)

    def breaking(self, named: Iterable[Any], part: str) -> Iterator[Any]:
        for i, item in enumerate(named):
            if part in self.fault and i == 5:
                raise RuntimeError("fault injected")
            yield item

    def outcome(self, ok: bool, state: str, message: str, retracted: int = 0) -> dict[str, Any]:
        return {"ok": ok, "state": state, "message": message, "retracted": retracted, "parts": self.parts}


def _broken(scheduler: Any) -> bool:
    return getattr(scheduler, "_milkweed_broken", False)


def _refusal(scheduler: Any) -> str | None:
    """Why this engine's weights cannot be replaced while it runs, if so."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.model_executor.model_runner_components.weight_updater import (
        _unsupported_derived_weight_cache_error,
    )
    from sglang.srt.runtime_context import get_model

    if get_model().weight_cache_mode != "off":
        return "SGLang shares its weights with a weight cache daemon: start it with weight_cache_mode = \"off\""
    if scheduler.disaggregation_mode != DisaggregationMode.NULL and (what := sglang_pairs.busy(scheduler)):
        return f"{sglang_pairs.BUSY} {what}"  # its KV may be going to or coming from another engine
    if len(scheduler.grammar_manager.grammar_queue):
        return "a grammar is being compiled; try again"
    for _, runner in scheduler.weight_updater._select_runners():
        if reason := _unsupported_derived_weight_cache_error(runner.weight_updater.get_model()):
            return reason
    return None


def _pause(scheduler: Any) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))


def _continue(scheduler: Any) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    scheduler.continue_generation(ContinueGenerationReqInput())


def _flush(scheduler: Any) -> None:
    try:
        done = scheduler.flush_cache(empty_cache=False)
    except Exception:  # half of it may be done
        scheduler._milkweed_broken = True
        raise
    if not done:
        raise RuntimeError("SGLang refused to flush its cache")


def _load(scheduler: Any, source: Any, run: _Operation, part: str) -> None:
    """From tensors by name through SGLang's loader, or from an image straight into the parameters; SGLang's own steps
    before and after loading are taken either way."""
    from milkweed.rollout.images import Filling

    runners = scheduler.weight_updater._select_runners()
    image = isinstance(source, Filling)
    named = source if image else run.breaking(source, part)
    named = list(named) if not image and len(runners) > 1 else named
    for _, runner in runners:
        updater = runner.weight_updater
        updater.begin_weight_update()
        if image:
            _fill(source, run, part)
        else:
            updater.get_model().load_weights(named)
        updater.end_weight_update(run_post_load=False)


def _fill(filling: Any, run: _Operation, part: str) -> None:
    from milkweed.transfer.copying import copy

    jobs: list[Any] = []
    try:
        for some in run.breaking(filling.parts(), part):
            jobs += some
    finally:  # where it breaks off, what came before is copied
        copy(jobs)
    filling.check()


def _source(scheduler: Any, staged: str, head: bool, changed_only: bool = False) -> Any:
    """What to load: tensors by name, or what fills the parameters from an image."""
    import msgspec

    from milkweed.transfer.manifest import Staged

    version = msgspec.json.decode(staged, type=Staged)
    if not version.layout:
        return _named(staged, head)
    live = getattr(scheduler, "_milkweed_image", None)
    if live is None:
        raise RuntimeError("the engine's layout was never asked for")
    image = live.check(version, scheduler.weight_updater._select_runners()[0][1].weight_updater.get_model())
    return live.filling(image, version.ranges if changed_only else None)


def _named(staged: str, head: bool) -> list[Any]:
    import msgspec

    from milkweed.transfer.manifest import Staged
    from milkweed.transfer.staging import open_staged

    named = open_staged(msgspec.json.decode(staged, type=Staged)).tensors()
    return [(n, t) for n, t in named.items() if head or n != "lm_head.weight"]


def _before(scheduler: Any, previous: str, folder: str, head: bool) -> Any:
    """The weights served until now: the slot they were committed from, or the folder the engine started from."""
    if not previous:
        return _folder(folder, head)
    import msgspec

    from milkweed.transfer.manifest import Staged
    from milkweed.transfer.staging import open_staged

    version = msgspec.json.decode(previous, type=Staged)
    if not version.layout:  # an image has its stamp instead
        open_staged(version).verify()  # the puller may have taken the slot since
    return _source(scheduler, previous, head)


def _folder(folder: str, head: bool) -> Iterable[Any]:
    from pathlib import Path

    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if head or name != "lm_head.weight":
                    yield name, tensors.get_tensor(name)
