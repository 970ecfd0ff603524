#!/usr/bin/env python3
"""Tokens/s of SGLang's CPU decode: attention backend torch_native_batched against torch_native, in one run.

Both engines live at once and take turns on the same prompts, so what else the machine does falls on both alike; the
best of `--rounds` counts. Model: a randomly initialised Qwen3 of 18.8M parameters, fp32, one thread. With `--json` the
last line is one JSON object: for each batch size tokens/s of both, `ratio` (by wall clock) and `cpu_ratio` (by the
scheduler's CPU time, for a busy machine), and `same_tokens`: whether greedy decoding gave equal tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

BACKENDS = ("torch_native", "torch_native_batched")
PROMPT, NEW = 64, 128
START_S, ROUND_S = 420.0, 300.0  # of an engine start and of one order; generous, for a machine with other work


def make_model(folder: Path) -> None:
    """Write the 18.8M-parameter Qwen3 (weights only: prompts are token ids, no tokenizer is needed)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2,
        head_dim=64, vocab_size=2048, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=2,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def serve(pipe, model: str, backend: str) -> None:
    """One engine in a process of its own: answers (prompts, sampling) with (tokens, seconds, CPU seconds)."""
    import psutil
    from milkweed.fleet.processes import library_shm, remove_named

    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # SGLang leaves its sockets behind, and its figures of load
        import sglang
        from sglang_cpu import engine_arguments

        arguments = {**engine_arguments(), "attention_backend": backend, "max_total_tokens": 32768, "log_level": "error"}
        engine = sglang.Engine(
            model_path=model, dtype="float32", skip_tokenizer_init=True, max_running_requests=64, random_seed=1, **arguments
        )
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        scheduler = next(p for p in family if "scheduler" in " ".join(p.cmdline()))
        litter = library_shm(p.pid for p in family)
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            prompts, sampling = order
            before, start = sum(scheduler.cpu_times()[:2]), time.perf_counter()
            replies = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
            seconds = time.perf_counter() - start
            pipe.send(([r["output_ids"] for r in replies], seconds, sum(scheduler.cpu_times()[:2]) - before))
        engine.shutdown()
        remove_named(litter)


class Served:
    """The far end of `serve`; every wait has a deadline, and leaving takes the engine's processes along."""

    def __init__(self, model: str, backend: str) -> None:
        self.backend = backend
        spawn = multiprocessing.get_context("spawn")
        self._pipe, far = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(far, model, backend))
        self._process.start()
        far.close()

    def receive(self, deadline_s: float):
        if not self._pipe.poll(deadline_s):
            raise TimeoutError(f"the engine with {self.backend} gave no answer within {deadline_s:.0f} s")
        return self._pipe.recv()

    def run(self, prompts: list[list[int]], temperature: float, new: int = NEW):
        """`new` tokens for each prompt: (token lists, seconds, the scheduler's CPU seconds)."""
        self._pipe.send((prompts, {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True}))
        return self.receive(ROUND_S)

    def stop(self) -> None:
        import psutil

        if self._process.is_alive():
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
            self._pipe.send(None)
            self._process.join(20)
            for process in family:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue  # gone already, as it should be
        self._process.join(10)


def measure(engines: list[Served], batches: list[int], rounds: int, say) -> dict:
    results = {}
    for batch in batches:
        prompts = [[(7 * i + 13 * j) % 900 + 3 for i in range(PROMPT)] for j in range(batch)]
        greedy = [engine.run(prompts, 0.0)[0] for engine in engines]
        best = {engine.backend: [float("inf"), float("inf")] for engine in engines}
        for _ in range(rounds):
            for engine in engines:
                _, seconds, cpu = engine.run(prompts, 1.0)
                best[engine.backend] = [min(a, b) for a, b in zip(best[engine.backend], (seconds, cpu), strict=True)]
        (wall, cpu), (new_wall, new_cpu) = (best[b] for b in BACKENDS)
        results[str(batch)] = row = {
            "tokens_per_s": {b: round(batch * NEW / best[b][0], 1) for b in BACKENDS},
            "ratio": round(wall / new_wall, 3),
            "cpu_ratio": round(cpu / new_cpu, 3),
            "same_tokens": greedy[0] == greedy[1],
        }
        speeds = " ".join(f"{b} {s:8.1f} tok/s" for b, s in row["tokens_per_s"].items())
        say(f"batch {batch:3d}: {speeds}  {row['ratio']:.2f}x ({row['cpu_ratio']:.2f}x by CPU time)"
            f"  greedy tokens {'equal' if row['same_tokens'] else 'DIFFER'}")  # fmt: skip
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder to measure instead")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()

    from sglang_cpu import environment

    os.environ.update(environment(threads=1), HF_HUB_OFFLINE="1")

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / "qwen3"
        if options.model is None:
            make_model(model)
        engines: list[Served] = []
        try:
            for backend in BACKENDS:
                say(f"starting SGLang with {backend}")
                engines.append(Served(str(model), backend))
                engines[-1].receive(START_S)
                engines[-1].run([[3, 4, 5]] * 4, 1.0, new=4)
            results = measure(engines, options.batches, options.rounds, say)
        finally:
            for engine in engines:
                engine.stop()
    if options.json:
        print(json.dumps({"batches": results}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
