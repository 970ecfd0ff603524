"""Python and shell as tools, in one sandboxed process for each trajectory, its state kept between calls.

tool call ──► request line ──► the process (limits and namespaces of `sandbox.py`)
observation ◄── what it printed, up to the reply, the deadline or a limit; past those it is killed with all it started
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from milkweed.environments import sandbox
from milkweed.environments.execution import CodeLimits
from milkweed.environments.tools import Tool
from milkweed.errors import EnvironmentFailed

MAIN = Path(__file__).with_name("session_main.py")
START_S = 30.0
AT_ONCE = 64
"""Processes alive at the same time; a trajectory that wants one more waits for another to end."""

BUSY = 2 * (os.cpu_count() or 1) + 2
"""Those of them that run something; waiting for one's turn does not count against the deadline."""

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, asyncio.Semaphore]] = WeakKeyDictionary()


def _turns() -> tuple[asyncio.Semaphore, asyncio.Semaphore]:
    made = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(BUSY)
    return _slots.setdefault(asyncio.get_running_loop(), made)


class Session:
    """A process that runs Python and shell for one trajectory. It starts with the first call; one that was killed is
    started anew, empty, by the next. Use from one event loop; end it with `close`."""

    def __init__(self, limits: CodeLimits | None = None) -> None:
        self.limits = limits or CodeLimits()
        self.isolation = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._slot: asyncio.Semaphore | None = None
        self._lock = asyncio.Lock()
        self._buffers: dict[int, bytearray] = {}
        self._to = self._reply = self._out = -1
        self._news = asyncio.Event()

    async def run(self, kind: Literal["python", "shell"], source: str) -> str:
        """What `source` printed. Raises EnvironmentFailed where no process can be had; whatever the code does is told
        in the text."""
        async with self._lock:
            if self._slot is None:
                alive = _turns()[0]
                await alive.acquire()
                self._slot = alive
            async with _turns()[1]:
                return await self._run(kind, source)

    async def _run(self, kind: str, source: str) -> str:
        if self._process is None:
            await self._start()
        word = os.urandom(8).hex()
        fault = await self._ask({"word": word, kind: source}, word, self.limits.deadline_s)
        text = bytes(self._buffers[self._out][: self.limits.output_bytes]).decode("utf-8", "replace")
        self._buffers[self._out].clear()
        if fault:
            await self._end()
            text += f"\n(error: {fault}; the session's state is lost)"
        return text

    async def close(self) -> None:
        """Ends the process with everything it started. May be called twice, and at any time."""
        await self._end()
        if self._slot is not None:
            self._slot.release()
            self._slot = None

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._spawn()
        except OSError as error:
            raise EnvironmentFailed(f"no process for the Python and shell tools: {error}") from error
        for fd in (self._reply, self._out):
            self._buffers[fd] = bytearray()
            loop.add_reader(fd, self._read, fd)
        fault = await self._ask(None, None, START_S)
        if fault:
            said = bytes(self._buffers[self._out])[-400:].decode("utf-8", "replace")
            await self._end()
            raise EnvironmentFailed(f"the process for the Python and shell tools did not start: {fault} {said}")

    def _spawn(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="mw-tool-")
        os.chmod(self._folder, 0o777)
        reader, self._to = os.pipe()
        self._reply, writer = os.pipe()
        self._out, out = os.pipe()
        limits = self.limits
        numbers = [reader, writer, os.getpid(), limits.memory_bytes, limits.processes, limits.file_bytes]
        started = False
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LC_ALL", "TZ")}
        own = {"HOME": self._folder, "TMPDIR": self._folder, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-I", "-u", str(MAIN), *map(str, numbers), self._folder],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(reader, writer),
                start_new_session=True,
                env=kept | own,
            )
            started = True
        finally:
            for fd in (reader, writer, out, *(() if started else (self._to, self._reply, self._out))):
                os.close(fd)
            if not started:
                shutil.rmtree(self._folder, ignore_errors=True)
        for fd in (self._to, self._reply, self._out):
            os.set_blocking(fd, False)

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._buffers[fd] += data
        over = len(self._buffers[fd]) > self.limits.output_bytes
        if not data or over:
            asyncio.get_running_loop().remove_reader(fd)  # it has had its say; what more it prints stays in the pipe
        if fd == self._reply or over:
            if not data and fd == self._reply:
                self._buffers[fd] += b"\n"  # the end: an empty line
            self._news.set()

    async def _ask(self, request: dict[str, Any] | None, word: str | None, deadline_s: float) -> str | None:
        """Send, and wait for the reply with `word` (None: the greeting). Returns what went wrong."""
        end = time.monotonic() + deadline_s
        waiting = b"" if request is None else json.dumps(request).encode() + b"\n"
        assert self._process is not None
        while True:
            if waiting:
                try:
                    waiting = waiting[os.write(self._to, waiting[: 1 << 16]) :]
                except BlockingIOError:
                    pass  # it does not read yet
                except OSError:
                    return "the process ended"
            answers = self._buffers[self._reply]
            while b"\n" in answers:
                line, _, rest = bytes(answers).partition(b"\n")
                answers[:] = rest
                if not line:
                    return "the process ended"
                try:
                    answer = json.loads(line)
                except ValueError:
                    return "the process wrote into its own pipe"
                if word is None and "isolation" in answer:
                    self.isolation = answer["isolation"]
                    return None
                if answer.get("word") == word:
                    await asyncio.sleep(0)  # what was printed before the reply is in the pipe
                    self._read(self._out)
                    return None
            if len(self._buffers[self._out]) > self.limits.output_bytes:
                return f"it printed more than {self.limits.output_bytes} bytes"
            left = end - time.monotonic()
            if left <= 0:
                return f"it took longer than {deadline_s:g} s"
            self._news.clear()
            try:
                async with asyncio.timeout(min(left, 0.01 if waiting else 0.25)):
                    await self._news.wait()
            except TimeoutError:
                if len(sandbox.descendants(self._process.pid, 100)) > self.limits.processes + 4:
                    return f"it started more than {self.limits.processes} processes"

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            # forgotten with the process: once closed, a number may be that of another session's pipe
            for fd in self._buffers:
                asyncio.get_running_loop().remove_reader(fd)
            self._buffers = {}
            if not self.isolation.startswith("pid"):
                sandbox.kill_descendants(process.pid)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself
            for fd in (self._to, self._reply, self._out):
                os.close(fd)
            end = time.monotonic() + 5.0
            while process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(0.002)
            shutil.rmtree(self._folder, ignore_errors=True)


class SessionTool(Tool):
    """Runs its one argument in the trajectory's `Session`."""

    def __init__(self, kind: Literal["python", "shell"], description: str, limits: CodeLimits) -> None:
        key = "code" if kind == "python" else "command"
        parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        super().__init__(kind, description, parameters, deadline_s=None)
        self.kind, self.key, self.limits = kind, key, limits
        self._session: Session | None = None

    def session(self, shared: dict[Any, Any]) -> Tool:
        mine = SessionTool(self.kind, self.description, self.limits)  # type: ignore[arg-type]
        mine._session = shared.get(("session", self.limits)) or Session(self.limits)
        shared["session", self.limits] = mine._session
        return mine

    async def run(self, arguments: dict[str, Any]) -> str:
        if self._session is None:
            self._session = Session(self.limits)
        return await self._session.run(self.kind, arguments[self.key])  # type: ignore[arg-type]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def python_tool(limits: CodeLimits | None = None) -> Tool:
    """A tool `python(code)`: runs in a sandboxed process without network, killed at its limits; variables and files
    stay for the trajectory's later calls, and are shared with a `shell_tool` of the same limits."""
    about = "Runs Python code; prints and the value of the last expression come back. Variables are kept between calls."
    return SessionTool("python", about, limits or CodeLimits())


def shell_tool(limits: CodeLimits | None = None) -> Tool:
    """A tool `shell(command)`: bash, in the same kind of process as `python_tool`; files, directory and exported
    variables stay for later calls."""
    about = "Runs a bash command; its output comes back. Files, directory and variables are kept between calls."
    return SessionTool("shell", about, limits or CodeLimits())
