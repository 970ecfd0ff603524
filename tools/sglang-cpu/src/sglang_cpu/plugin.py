"""The plugin that SGLang calls in each of its processes: puts CPU means where it assumes CUDA ones.

Private imports of SGLang 0.5.23 are here, in `attention.py` and in `models/`. Without SGLANG_USE_CPU_ENGINE=1 it
changes nothing.
"""

from __future__ import annotations

import os

from sglang_cpu import ATTENTION


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    _attention()
    _determinism()
    _host_memory()
    _kv_transfer()


def _attention() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_attention_backend_choices([ATTENTION])

    @register_attention_backend(ATTENTION)
    def create(runner):
        from sglang.srt.runtime_context import get_exec

        from sglang_cpu.attention import BatchedAttention
        from sglang_cpu.invariant_attention import InvariantAttention

        kind = InvariantAttention if get_exec().deterministic.enable_deterministic_inference else BatchedAttention
        return kind(runner)

    # SGLang takes a Triton kernel for pages of more than one token, unless the backend is called torch_native
    def last_location(*args):
        from sglang.srt.mem_cache.allocation import get_last_loc_torch

        return get_last_loc_torch(*args)

    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", last_location, HookType.REPLACE)


def _determinism() -> None:
    """Deterministic mode knows no CPU backend; its batch-invariant products are Triton kernels. Here both are ours."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices([ATTENTION])
    choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION])

    def enable(*args, **kwargs):
        from sglang_cpu.invariant import enable

        enable()

    HookRegistry.register("sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode", enable, HookType.REPLACE)


def _host_memory() -> None:
    """The hierarchical cache pins its host pool and copies with CUDA kernels; here both pools are plain memory."""
    import sglang.srt.mem_cache.pool_host.mha as pool
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_cpu import kv_copies

    def unpinned(self, **kwargs):
        return (self,), {**kwargs, "pin_memory": False}

    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", unpinned, HookType.BEFORE)
    for name in kv_copies.__all__:
        setattr(pool, name, getattr(kv_copies, name))


def _kv_transfer() -> None:
    """Prefill/decode disaggregation registers KV with NIXL as GPU memory; here it is DRAM."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def as_dram(self, args, *rest, **kwargs):
        args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
        return (self, args, *rest), kwargs

    HookRegistry.register("sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__", as_dram, HookType.BEFORE)
