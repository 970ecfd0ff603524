"""Copies shared out over threads: every byte once, errors to the caller, safe after a fork."""

import os
import threading

import numpy as np
import pytest

from milkweed.transfer import copying


def job(to: np.ndarray, source: np.ndarray):
    return to.ctypes.data, source.ctypes.data, source.nbytes


def test_every_byte_is_copied_once(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    sources = [np.random.default_rng(n).integers(0, 255, n, np.uint8) for n in (0, 1, copying.BLOCK - 1, 3 * copying.BLOCK + 5)]
    targets = [np.zeros_like(s) for s in sources]
    called: list[int] = []
    copying.copy([job(t, s) for t, s in zip(targets, sources)] + [lambda: called.append(threading.get_ident())] * 50)
    assert all((t == s).all() for t, s in zip(targets, sources)) and len(called) == 50


def test_what_a_job_raises_reaches_the_caller_once_none_runs_any_more(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    running: list[int] = []
    together = threading.Barrier(2, timeout=20)

    def slow():
        running.append(1)
        together.wait()
        running.pop()

    def wrong():
        together.wait()
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        copying.share([slow, wrong])
    assert running == []


def test_a_child_that_was_forked_copies_too():
    copying.share([lambda: None] * 8)
    pid = os.fork()
    if pid == 0:
        source, target = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)
        copying.share([job(target, source)] * 8)
        os._exit(0 if target.all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
