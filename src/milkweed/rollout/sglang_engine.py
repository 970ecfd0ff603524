"""SGLang from the outside: how an engine is started, asked, told and stopped. With `sglang_hooks.py` the only module
that imports SGLang; what it takes from SGLang's insides was read from version 0.5.23.

Of an engine's processes this one holds SGLang's tokenizer manager; the schedulers (one a tensor-parallel rank) are
its children. There is no detokenizer process: schedulers answer straight to the tokenizer manager, and finished
samples are decoded here, in batches. That saves half a gigabyte and seconds of start-up.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkweed.errors import ConfigError, DataError, MilkweedError
from milkweed.fleet.loopback import keep_stores
from milkweed.rollout import sglang_pairs
from milkweed.rollout.pages import Counts
from milkweed.rollout.sglang_kv import SHARE, TIER

if TYPE_CHECKING:
    from milkweed.rollout.protocol import EngineRole, Pair
    from milkweed.types import Sampling

SGLANG_VERSION = "0.5.23"
STREAM_EVERY = 32
"""Tokens after which a scheduler says how far a request is; for long ones a 64th of what they may have, since each time
the whole is read."""
ENGINE_MARK = "MILKWEED_ENGINE"
"""Set in the processes of our engines; elsewhere the plugin does nothing."""


class EngineDied(MilkweedError):
    """A process of the engine is gone, or it does not answer; it cannot be used again."""


def engine_environment(
    *, cpu: bool, tensor_parallel: int = 1, threads: int = 1, share_prefill: bool = True, tier: bool = False
) -> dict[str, str]:
    """Variables that an engine's process needs before Python imports anything of torch or SGLang."""
    env = {
        ENGINE_MARK: "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # log-probs of the distribution tokens are drawn from, that is after the temperature
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    }
    if share_prefill:
        env[SHARE] = "1"
    if tier:
        env[TIER] = "1"
    if cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}
        if models := _lean_models():
            # SGLang else imports every model file it has, about 200
            env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = models
        if tensor_parallel > 1:
            # one set of cores a rank; on fewer cores than that, ranks share them
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(tensor_parallel))
    return env


def _lean_models() -> str | None:
    for package in ("sglang_cpu", "sglang_cpu_compat"):
        if importlib.util.find_spec(package) and importlib.util.find_spec(f"{package}.models"):
            return f"{package}.models"
    return None


def engine_arguments(
    model: str,
    *,
    cpu: bool,
    dtype: str = "float32",
    tensor_parallel: int = 1,
    version: str = "0.0",
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """SGLang's ServerArgs for `model`; `overrides` are the user's and win. Raises ConfigError for an unknown one."""
    args: dict[str, Any] = {
        "model_path": model,
        "dtype": dtype,
        "tp_size": tensor_parallel,
        "weight_version": version,
        "log_level": "error",
        "skip_server_warmup": True,
        "enable_cache_report": True,
        "sleep_on_idle": True,
    }
    if cpu:
        args |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.1,
            "max_total_tokens": 16384,
            "max_running_requests": 64,
        }
        if importlib.util.find_spec("sglang_cpu"):
            args["attention_backend"] = "torch_native_batched"
    args |= overrides or {}
    return args


class SGLang:
    """One engine and its processes. Make it, and call it, in one thread with a running event loop that lives as long
    as the engine: Linux kills the schedulers when the thread that started them ends."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Blocks until the engine can serve. Raises ConfigError (wrong version or argument), DataError (the model
        folder) or EngineDied (a scheduler died while starting)."""
        started = time.monotonic()
        found = importlib.metadata.version("sglang")
        if found != SGLANG_VERSION:
            raise ConfigError(f"SGLang {found} is installed; Milkweed is made for {SGLANG_VERSION}: install that one")
        if not os.path.isfile(os.path.join(arguments["model_path"], "config.json")):
            raise DataError(f"{arguments['model_path']}: no config.json, so it is no Hugging Face model folder")
        # A scheduler that fails sends its parent SIGQUIT, and SGLang's handler then kills this whole process. We
        # watch the schedulers ourselves and report.
        ctypes.CDLL(None).signal(signal.SIGQUIT, ctypes.c_void_p(1))
        import msgspec

        with _without_compiler(arguments.get("device") == "cpu"):
            import sglang.srt.entrypoints.engine as sgl

        known = {f.name for f in msgspec.structs.fields(sgl.ServerArgs)}
        if unknown := sorted(arguments.keys() - known):
            import difflib

            near = difflib.get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"[rollout.engine] {unknown[0]}: SGLang {SGLANG_VERSION} has no such argument{hint}")
        self._sgl = sgl
        try:
            self._engine = _engine_class(sgl, arguments.get("device") == "cpu")(**arguments)
        except RuntimeError as e:
            if "scheduler died" in str(e) or "Initialization failed" in str(e):
                raise EngineDied(f"SGLang did not start on {arguments['model_path']}: {e}") from e
            raise
        self._manager = self._engine.tokenizer_manager
        if self._manager._subprocess_watchdog is not None:
            self._manager._subprocess_watchdog.stop()
            self._manager._subprocess_watchdog = None
        self._processes = self._engine.milkweed_processes
        self._rpc_lock = asyncio.Lock()
        self._counts = _counts(arguments)
        self._aborted: set[str] = set()
        self.tokenizer = self._manager.tokenizer
        self.context_length: int = self._manager.context_len
        self.pool_tokens: int = self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
        self.longest_prompt: int = self._manager.max_req_input_len - 1
        self.deterministic: bool = bool(self._engine.server_args.enable_deterministic_inference)
        self.start_s = time.monotonic() - started

    @property
    def pids(self) -> dict[str, int]:
        return {f"scheduler{i}": p.pid for i, p in enumerate(self._processes)}

    def files(self) -> dict[str, int]:
        """What its ranks have counted of the files in the tier below it (`pages.COUNTS`); empty where it has none."""
        each = [c.read() for c in self._counts]
        return {name: sum(c[name] for c in each) for name in each[0]} if each else {}

    def dead(self) -> str | None:
        """Why the engine can serve no more, or None while all of its processes live."""
        for i, p in enumerate(self._processes):
            if not p.is_alive():
                code = p.exitcode
                how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with {code}"
                more = " (out of memory?)" if code == -signal.SIGKILL else ""
                return f"SGLang's scheduler {i} (process {p.pid}) {how}{more}"
        return None

    async def generate(
        self, request_id: str, token_ids: list[int], sampling: Sampling, grown: Callable[[dict[str, Any]], None] | None = None,
        pair: Pair | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """SGLang's own answer: `output_ids` and `meta_info`; `grown` hears of it as it grows. Raises ValueError for what
        SGLang refuses. `pair` is for an engine that prefills (it answers with one token) or decodes only."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        params: dict[str, Any] = {
            "max_new_tokens": min(sampling.max_tokens, self.context_length - len(token_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "ignore_eos": sampling.ignore_eos,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        stream = grown is not None and sampling.max_tokens > STREAM_EVERY
        if stream:
            params["stream_interval"] = max(STREAM_EVERY, sampling.max_tokens // 64)
        ask = GenerateReqInput(
            input_ids=token_ids, sampling_params=params, rid=request_id, return_logprob=True, stream=stream,
            **sglang_pairs.asked(pair),
        )  # fmt: skip
        if not stream or grown is None:
            return await self._first(ask)
        async for answer in self._manager.generate_request(ask, None):
            reason = answer["meta_info"]["finish_reason"]
            if reason is None:
                grown(answer)
            elif reason.get("type") == "abort" and (reason.get("status_code") or 0) >= 400:
                raise ValueError(reason["message"])  # as SGLang itself does where nothing is streamed
            else:
                return answer
        raise ValueError("SGLang returned nothing")

    async def score(self, request_id: str, token_ids: list[int], top: int, role: EngineRole = "whole") -> dict[str, Any]:
        """SGLang's own answer to a prompt without a completion: `meta_info` with `input_token_logprobs` and
        `input_top_logprobs`, at temperature 1 whatever is asked. Raises ValueError for what SGLang refuses."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        ask = GenerateReqInput(
            input_ids=token_ids,
            sampling_params={"max_new_tokens": 0},
            rid=request_id,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=top,
            stream=False,
            **sglang_pairs.alone(role),
        )
        return await self._first(ask)

    async def _first(self, ask: Any) -> dict[str, Any]:
        async for answer in self._manager.generate_request(ask, None):
            return answer
        raise ValueError("SGLang returned nothing")

    def abort(self, request_id: str) -> None:
        self._manager.abort_request(request_id)

    def decode(self, rows: list[list[int]]) -> list[str]:
        """The texts of `rows` of token ids, special tokens left out."""
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    async def call(self, method: str, parameters: dict[str, Any], deadline_s: float) -> tuple[bool, str]:
        """Runs a hook of sglang_hooks on every rank between two steps; success and message are rank 0's. Raises
        EngineDied when no answer comes by the deadline (SGLang's own call waits for ever)."""
        from sglang.srt.managers.io_struct import RpcReqInput

        nonce = uuid.uuid4().hex
        async with self._rpc_lock:
            request = RpcReqInput(method=method, parameters=parameters | {"nonce": nonce})
            self._sgl.sock_send(self._engine.send_to_rpc, request)
            # polled in a thread: the event loop goes on, and the wait ends at the deadline
            return await asyncio.to_thread(self._answer, method, nonce, deadline_s)

    def _answer(self, method: str, nonce: str, deadline_s: float) -> tuple[bool, str]:
        socket, end = self._engine.send_to_rpc, time.monotonic() + deadline_s
        while (left := end - time.monotonic()) > 0:
            if cause := self.dead():
                raise EngineDied(cause)
            if not socket.poll(int(min(left, 0.25) * 1000) + 1):
                continue
            reply = self._sgl.sock_recv(socket)
            body = json.loads(reply.message) if reply.message.startswith("{") else {}
            if body.get("nonce") == nonce:
                return reply.success, reply.message
            if not body:  # not a hook's answer: the hook is not there, or it failed outside its own reach
                return False, reply.message or f"SGLang has no hook {method}: is Milkweed's plugin loaded?"
            # else the late answer of a call whose deadline had passed
        raise EngineDied(f"the scheduler did not answer {method} in {deadline_s:g} s")

    def set_version(self, version: str) -> None:
        """Tells SGLang's front half what `call` already told the schedulers."""
        self._manager._update_weight_version_if_provided(version)

    async def checksum(self) -> dict[str, str]:
        """SGLang's checksum over the live parameters, by rank. Raises MilkweedError where it refuses."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        ok, message, ranks, _ = await self._manager.check_weights(CheckWeightsReqInput(action="checksum"), None)
        if not ok or not ranks:
            raise MilkweedError(f"SGLang gave no checksum of its weights: {message}")
        return {f"rank{i}": r["per_gpu_checksum"] for i, r in enumerate(ranks)}

    def close(self, wait_s: float = 5.0) -> None:
        """Kills the engine's processes and waits for them. May be called twice."""
        import atexit

        atexit.unregister(self._engine.shutdown)
        for p in self._processes:
            if p.is_alive():
                p.kill()
        for p in self._processes:
            p.join(wait_s)
        if self._engine.send_to_rpc is not None:
            self._engine.send_to_rpc.close(linger=0)
            self._engine.send_to_rpc = None
        # a file of load figures that SGLang leaves behind
        if path := getattr(self._manager.load_snapshot_reader, "path", None):
            Path(path).unlink(missing_ok=True)


def _counts(arguments: dict[str, Any]) -> list[Counts]:
    """Where the ranks of an engine that is up count what they do with files of KV."""
    where = json.loads(arguments.get("hicache_storage_backend_extra_config") or "{}").get("counts")
    ranks = range(int(arguments.get("tp_size", 1)))
    return [Counts(f"{where}{os.getpid()}-{rank}") for rank in ranks] if where else []


@contextmanager
def _without_compiler(cpu: bool) -> Iterator[None]:
    """On CPU nothing is compiled (TORCH_COMPILE_DISABLE), but SGLang's decorators would import the whole compiler:
    a fifth of the start-up."""
    import torch

    compile = torch.compile

    def plain(model: Any = None, **_: Any) -> Any:
        return model if model is not None else lambda f: f

    if cpu:
        torch.compile = plain  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The main function of a scheduler process."""
    import gc

    # what the process was forked with is never collected here: it belongs to the parent
    gc.freeze()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the parent ignores it
    keep_stores()
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args, **kwargs)


def _engine_class(sgl: Any, cpu: bool) -> Any:
    """SGLang's Engine without its detokenizer process. On CPU its schedulers are forked: they need not import SGLang
    once more (10 s of CPU time, 400 MiB), and no device is in use that a fork would break."""

    class Engine(sgl.Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        milkweed_processes: list[Any] = []

        @classmethod
        def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func, **kwargs):
            # the schedulers' output skips the detokenizer, as with skip_tokenizer_init, but they keep their
            # tokenizer, which stop strings need
            port_args.detokenizer_ipc_name = port_args.tokenizer_ipc_name
            if cpu:
                multiprocessing.set_start_method("fork", force=True)
            try:
                result, processes = super()._launch_scheduler_processes(
                    server_args, port_args, run_scheduler_process_func, **kwargs
                )
            finally:
                multiprocessing.set_start_method("spawn", force=True)
            cls.milkweed_processes = list(processes or [])
            return result, processes

        @classmethod
        def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
            return [], []

    return Engine
