"""Running code that a model wrote: one process a run, killed at its deadline with all it started, no network, nothing
written outside an own folder in memory, capped in memory, output and processes.

Isolation is what the kernel lends (`Run.isolation` says what it was): user, mount, PID, network and IPC namespaces;
where it refuses, the limits, the parent-death signal and the sweep remain, and files of the same user can be written.
"""

from __future__ import annotations

import ast
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from milkweed.environments import sandbox

RUNNER = Path(__file__).with_name("runner.py")
Status = Literal["ok", "raised", "exited", "timeout", "output", "processes", "killed"]


class CodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one run may use."""

    deadline_s: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    file_bytes: int = 16 << 20
    processes: int = 16


class Run(msgspec.Struct, kw_only=True):
    """How a run ended. `results` are those of the tests, one each that was reached."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    results: list[Any] = []
    seconds: float = 0.0
    isolation: str = ""


def code_in(completion: str) -> str:
    """The last fenced block marked as Python, else the last fenced block, else the whole completion."""
    blocks = re.findall(r"```[ \t]*(\w*)[ \t]*\r?\n(.*?)(?:```|\Z)", completion, re.DOTALL)
    python = [body for mark, body in blocks if mark.lower() in ("python", "py", "python3")]
    return (python or [body for _, body in blocks] or [completion])[-1]


def run_python(
    source: str, *, stdin: str = "", tests: Sequence[dict[str, Any]] = (), limits: CodeLimits | None = None
) -> Run:
    """Run `source` as a program, then `tests` in its namespace. Never raises for what the program does.

    A test is `{"call": name, "args": [...]}`, whose result is the returned value as a literal, or
    `{"check": source}`, whose result is True where it ran to its end. Each is sent only when the program has ended
    normally and the one before it was answered, with a word that must come back: a program that exits early, or
    prints what it thinks the harness wants, has answered nothing.
    """
    limits = limits or CodeLimits()
    with tempfile.TemporaryDirectory(prefix="mw-code-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o777)
        return _Process(source, stdin, tests, limits, folder).run()


class _Process:
    def __init__(
        self, source: str, stdin: str, tests: Sequence[dict[str, Any]], limits: CodeLimits, folder: str
    ) -> None:
        self.limits, self.tests, self.results = limits, list(tests), []
        self.start = time.monotonic()
        to_child, self.to = os.pipe()
        self.reply, from_child = os.pipe()
        in_r, self.stdin = os.pipe()
        self.out, out_w = os.pipe()
        self.err, err_w = os.pipe()
        theirs = (to_child, from_child, in_r, out_w, err_w)
        arguments = [to_child, from_child, os.getpid(), limits.memory_bytes, limits.processes, limits.file_bytes]
        environment = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LC_ALL", "TZ")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-I", str(RUNNER), *map(str, arguments), folder],
            stdin=in_r,
            stdout=out_w,
            stderr=err_w,
            pass_fds=(to_child, from_child),
            start_new_session=True,
            env=environment | {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        for fd in theirs:
            os.close(fd)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.mine = [self.to, self.reply, self.stdin, self.out, self.err, self.pidfd]
        for fd in self.mine[:-1]:
            os.set_blocking(fd, False)
        self.pending = {self.stdin: stdin.encode("utf-8", "replace"), self.to: _line({"source": source})}
        self.got = {self.out: bytearray(), self.err: bytearray(), self.reply: bytearray()}
        self.isolation, self.status, self.word = "", "exited", ""

    def run(self) -> Run:
        try:
            self._talk()
        finally:
            self._end()
        out, err = (bytes(self.got[fd]).decode("utf-8", "replace") for fd in (self.out, self.err))
        return Run(
            status=self.status,  # type: ignore[arg-type]
            stdout=out,
            stderr=err[-4000:],
            results=self.results,
            seconds=time.monotonic() - self.start,
            isolation=self.isolation,
        )

    def _talk(self) -> None:
        """Feed and read until the program and its tests are over, one way or another; sets `status`."""
        reading = set(self.got)
        while True:
            left = self.start + self.limits.deadline_s - time.monotonic()
            if left <= 0:
                self.status = "timeout"
                return
            poll = select.poll()
            for fd in reading:
                poll.register(fd, select.POLLIN)
            for fd, data in self.pending.items():
                if data:
                    poll.register(fd, select.POLLOUT)
            poll.register(self.pidfd, select.POLLIN)
            ready = dict(poll.poll(min(left, 0.1) * 1000))
            if not ready and len(sandbox.descendants(self.process.pid, 100)) > self.limits.processes + 3:
                self.status = "processes"
                return
            for fd in [fd for fd, data in self.pending.items() if data and fd in ready]:
                self._write(fd)
            for fd in reading & set(ready):
                if not self._read(fd):
                    reading.discard(fd)
            if sum(len(self.got[fd]) for fd in (self.out, self.err)) > self.limits.output_bytes:
                self.status = "output"
                return
            if self._answers():
                return
            if self.pidfd in ready and not (reading & set(ready)):
                code = self.process.wait(5.0)
                if self.status != "raised":
                    self.status = "exited" if 0 <= code < 128 else "killed"
                return

    def _write(self, fd: int) -> None:
        try:
            sent = os.write(fd, self.pending[fd][:65536])
        except BrokenPipeError:
            sent = len(self.pending[fd])  # it reads no more: its own affair
        self.pending[fd] = self.pending[fd][sent:]
        if not self.pending[fd] and fd == self.stdin:
            self.mine.remove(fd)
            os.close(fd)
            del self.pending[fd]

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return True
        self.got[fd] += data
        return bool(data)

    def _answers(self) -> bool:
        """Take the runner's lines; True when nothing more is to come."""
        if self.stdin in self.pending and not self.pending[self.stdin]:
            self._write(self.stdin)
        buffer = self.got[self.reply]
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            try:
                answer = json.loads(line)
            except ValueError:
                self.status = "exited"  # someone else wrote into the pipe
                return True
            if "isolation" in answer:
                self.isolation = answer["isolation"]
            elif "raised" in answer and not self.word:
                self.status = "raised"
            elif answer.get("word") == self.word:
                if self.word:
                    self.results.append(_literal(answer.get("value")))
                self.status = "ok"
                if len(self.results) == len(self.tests):
                    return True
                self.word = os.urandom(12).hex()
                self.pending[self.to] = _line({"word": self.word, **self.tests[len(self.results)]})
                self.status = "exited"  # until it answers
        return False

    def _end(self) -> None:
        # output still in the pipe belongs to a program that ended well
        if self.status in ("ok", "raised", "exited"):
            for fd in (self.out, self.err):
                while len(self.got[fd]) <= self.limits.output_bytes:
                    before = len(self.got[fd])
                    if not self._read(fd) or len(self.got[fd]) == before:
                        break
        if self.process.poll() is None:
            if not self.isolation.startswith("pid"):
                sandbox.kill_descendants(self.process.pid)
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended between the two lines
        self.process.wait(5.0)
        for fd in self.mine:
            os.close(fd)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _literal(value: Any) -> Any:
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def code_tests(
    completion: str, tests: Sequence[Any] | dict[str, Any] | str, *, limits: CodeLimits | None = None
) -> float:
    """The fraction of `tests` that the code in `completion` passes (a verifier: `by_answer(code_tests)`).

    A test is source with asserts (text), `{"call": name, "args": [...], "expected": value}`, or
    `{"stdin": text, "stdout": text}`: a run of its own, compared line by line without trailing white space. Values
    are compared here, not in the program's process, so that it cannot answer with an object equal to everything.
    Asserts run in its process and can be deceived by such an object: prefer calls.
    Raises ValueError for a test that is none of these.
    """
    tests = [tests] if isinstance(tests, (str, dict)) else list(tests)
    if not tests:
        raise ValueError("no tests to run")
    source = code_in(completion)
    inside: list[dict[str, Any]] = []
    passed = 0
    for test in tests:
        if isinstance(test, str):
            inside.append({"check": test})
        elif isinstance(test, dict) and "call" in test and "expected" in test:
            inside.append(test)
        elif isinstance(test, dict) and "stdout" in test:
            run = run_python(source, stdin=str(test.get("stdin", "")), limits=limits)
            # a program may well end by exit(0): what it printed is the answer
            passed += run.status in ("ok", "exited") and same_output(run.stdout, str(test["stdout"]))
        else:
            raise ValueError(f"not a test: {test!r:.80}; give asserts, call and expected, or stdin and stdout")
    if inside:
        asked = [{k: v for k, v in t.items() if k != "expected"} for t in inside]
        results = run_python(source, tests=asked, limits=limits).results
        for test, result in zip(inside, results, strict=False):
            passed += result is True if "check" in test else same_value(result, test["expected"])
    return passed / len(tests)


def same_output(given: str, expected: str) -> bool:
    """Line by line, white space at the ends of lines and of the whole left aside."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.replace("\r\n", "\n").strip().split("\n")]

    return lines(given) == lines(expected)


def same_value(given: Any, expected: Any) -> bool:
    """Equal as JSON would have it: a tuple is a list, True is not 1, floats within 1e-9."""
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(given, (list, tuple))
            and len(given) == len(expected)
            and all(same_value(g, e) for g, e in zip(given, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(given, dict)
            and {str(k) for k in given} == {str(k) for k in expected}
            and all(same_value(v, {str(k): e for k, e in expected.items()}[str(k)]) for k, v in given.items())
        )
    if isinstance(expected, bool) or isinstance(given, bool) or expected is None:
        return type(given) is type(expected) and given == expected
    if isinstance(expected, float) and isinstance(given, (int, float)):
        return given == expected or abs(given - expected) <= 1e-9 * max(1.0, abs(expected))
    return bool(given == expected)
