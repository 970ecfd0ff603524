"""What the probe warns of."""

import msgspec

from milkweed.transfer.probe import Probe, judge

GOOD = Probe(
    nixl="1.5.1", plugins=["UCX"], backends=["UCX"], nbytes=1 << 26, memcpy_gb_s=6.8, readv_gb_s=5.5, nixl_gb_s=5.4
)


def test_a_fast_transport_gives_no_warning():
    assert judge(GOOD) == []
    assert GOOD.line == "NIXL 1.5.1 (UCX): READ 5.4 GB/s, 0.79 of memcpy (6.8); process_vm_readv 5.5"


def test_a_slow_transport_is_named_with_its_mend(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    (line,) = judge(msgspec.structs.replace(GOOD, nixl_gb_s=1.7))
    assert "0.25 of memcpy, below the floor of 0.4: unset UCX_TLS" in line


def test_a_kernel_that_refuses_reads_between_processes_is_named_with_its_mend():
    refused = msgspec.structs.replace(GOOD, readv_gb_s=None, nixl_gb_s=2.1)
    first, second = judge(refused)
    assert "ptrace_scope=0" in first and "below the floor" in second
    assert "process_vm_readv refused" in refused.line
