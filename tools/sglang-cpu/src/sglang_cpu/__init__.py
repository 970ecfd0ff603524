"""Lets the unmodified SGLang wheel run on a machine without a GPU. Imported when Python starts: keep it cheap."""

SGLANG = "0.5.23"
"""The only SGLang release whose insides this package was written against."""

ATTENTION = "torch_native_batched"
"""Name of the attention backend registered here (`attention.py`)."""


def environment(threads: int = 1) -> dict[str, str]:
    """Environment that every process of a CPU engine needs, from before it imports torch or SGLang.

    `threads` is for one process: without it each would take every core of the machine.
    """
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu.models",
        "OMP_NUM_THREADS": str(threads),
        "TORCH_COMPILE_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def engine_arguments() -> dict[str, object]:
    """Arguments of `sglang.Engine` without which it does not run, or wastes a core, on a CPU."""
    return {
        "device": "cpu",
        "attention_backend": ATTENTION,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.1,
        "sleep_on_idle": True,
    }
