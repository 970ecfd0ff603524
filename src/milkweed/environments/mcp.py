"""MCP servers as sources of tools: a process on its standard streams, or an address over HTTP."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

from milkweed.environments.tools import Tool
from milkweed.errors import ConfigError, EnvironmentFailed


class McpServer:
    """A connection to an MCP server; `tools` are what it offers. Use it as `async with McpServer("python server.py")`.

    `server` is a command (text or a list of words), or an http(s) address that speaks streamable HTTP. All trajectories
    share the connection, unless `per_trajectory`: then each opens its own when it first calls a tool, for servers that
    keep a state. A server that fails, or does not answer within `deadline_s`, raises EnvironmentFailed for the
    trajectory that asked, and is connected to anew by the next call.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float = 30.0,
        per_trajectory: bool = False,
    ) -> None:
        self.server, self.env, self.cwd, self.headers = server, env, cwd, headers
        self.deadline_s, self.per_trajectory = deadline_s, per_trajectory
        self.name = server if isinstance(server, str) else " ".join(server)
        self.tools: list[Tool] = []
        self._session: Any = None
        self._holder: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> McpServer:
        session = await self._connected()
        try:
            async with asyncio.timeout(self.deadline_s):
                listed = await session.list_tools()
        except Exception as error:
            await self.close()
            raise EnvironmentFailed(f"MCP server {self.name} did not list its tools: {_cause(error)}") from error
        self.tools = [McpTool(self, t.name, t.description or "", t.inputSchema) for t in listed.tools]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What the tool answered, as text. Raises EnvironmentFailed where the server did not answer."""
        session = await self._connected()
        try:
            async with asyncio.timeout(self.deadline_s + 5.0):
                result = await session.call_tool(
                    name, arguments, read_timeout_seconds=timedelta(seconds=self.deadline_s)
                )
        except Exception as error:  # its own errors, anyio's and the transport's
            await self.close()
            raise EnvironmentFailed(f"MCP server {self.name}: {name} failed: {_cause(error)}") from error
        text = "\n".join(c.text if c.type == "text" else f"({c.type})" for c in result.content)
        return f"error: {text}" if result.isError else text

    async def close(self) -> None:
        """Ends the connection, and the process that was started for it."""
        self._stop.set()
        holder, self._holder, self._session = self._holder, None, None
        if holder is not None:
            _, late = await asyncio.wait([holder], timeout=10.0)
            for task in late:
                task.cancel()

    async def _connected(self) -> Any:
        async with self._lock:
            if self._holder is not None and self._holder.done():
                self._session = None
            if self._session is None:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._stop = asyncio.Event()
                self._holder = asyncio.create_task(self._hold(ready, self._stop), name=f"MCP server {self.name}")
                try:
                    async with asyncio.timeout(self.deadline_s):
                        self._session = await ready
                except Exception as error:
                    await self.close()
                    raise EnvironmentFailed(f"MCP server {self.name} cannot be reached: {_cause(error)}") from error
            return self._session

    async def _hold(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """The connection is entered and left by one task, as anyio wants it."""
        from mcp import ClientSession

        try:
            async with AsyncExitStack() as stack:
                reader, writer = (await stack.enter_async_context(self._transport()))[:2]
                session = await stack.enter_async_context(ClientSession(reader, writer))
                await session.initialize()
                if not ready.done():
                    ready.set_result(session)
                await stop.wait()
        except Exception as error:  # told to whoever waits; later callers meet it in their own call
            if not ready.done():
                ready.set_exception(error)

    def _transport(self) -> Any:
        if isinstance(self.server, str) and self.server.startswith(("http://", "https://")):
            from mcp.client.streamable_http import streamablehttp_client

            return streamablehttp_client(self.server, headers=dict(self.headers or {}), timeout=self.deadline_s)
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        words = shlex.split(self.server) if isinstance(self.server, str) else list(self.server)
        if not words:
            raise ConfigError("an MCP server needs a command or an address")
        env = None if self.env is None else dict(self.env)
        return stdio_client(StdioServerParameters(command=words[0], args=words[1:], env=env, cwd=self.cwd))


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, server: McpServer, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(name, description, parameters, deadline_s=None)
        self.server = server
        self._own = False

    def session(self, shared: dict[Any, Any]) -> Tool:
        s = self.server
        if not s.per_trajectory:
            return self
        if s not in shared:
            shared[s] = McpServer(s.server, env=s.env, cwd=s.cwd, headers=s.headers, deadline_s=s.deadline_s)
        mine = McpTool(shared[s], self.name, self.description, self.parameters)
        mine._own = True
        return mine

    async def run(self, arguments: dict[str, Any]) -> str:
        return await self.server.call(self.name, arguments)

    async def close(self) -> None:
        if self._own:
            await self.server.close()


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
