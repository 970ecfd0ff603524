"""What the probe warns of."""

import msgspec

from milkweed.transfer.probe import Probe, judge

GOOD = Probe(
    nixl="1.5.1", plugins=["UCX"], backends=["UCX"], nbytes=1 << 26, memcpy_gb_s=6.8, readv_gb_s=5.5, nixl_gb_s=5.4,
    shm_gb_s=6.6,
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


def test_the_ways_of_the_weights_are_said_with_their_speeds():
    assert GOOD.ways.startswith("shared memory on the trainer's host (6.6 GB/s), NIXL over UCX (5.4 GB/s), messages")


def test_shared_memory_that_is_slow_or_not_there_is_named_with_its_mend():
    (none,) = judge(msgspec.structs.replace(GOOD, shm_gb_s=None))
    assert "/dev/shm has no room" in none and "--shm-size" in none
    (slow,) = judge(msgspec.structs.replace(GOOD, shm_gb_s=1.0))
    assert "copies into /dev/shm reach 1.00 GB/s, below 0.4 of memcpy (6.80)" in slow
