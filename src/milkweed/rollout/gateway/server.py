"""The gateway itself: Starlette routes over the router, served by uvicorn in the controller's own event loop.

A sample travels as ids: agent ──HTTP──► session (messages to ids) ──► router ──► engine, and back. The session keeps
what was sampled; the agent gets text. Streams are cut from whole completions: the client sees the form, not the first
token early.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from milkweed.environments.aside import aside
from milkweed.environments.conversation import LimitReached, Limits, Reply
from milkweed.environments.threads import Threads
from milkweed.errors import DataError, FleetError, MilkweedError
from milkweed.rollout.gateway import wire
from milkweed.rollout.gateway.calls import LOOK_S, Bare, Gone, all_of, in_turn, unless_gone
from milkweed.rollout.gateway.sessions import Session
from milkweed.rollout.gateway.wire import Refused
from milkweed.types import Completion, Environment, Prompt, Sampling, Trajectory

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from milkweed.data.tokenizer import Chat

_log = logging.getLogger("milkweed.gateway")
BODY_BYTES = 32 << 20
IDLE_S = 3600.0
"""A session that nobody has used for so long is forgotten."""


class Gateway:
    """OpenAI's API over `router`, for the model of `chat`. Start it with `async with Gateway(...)`.

    It listens on this machine only unless `host` says otherwise, and every call must bring `token` (made up where none
    is given) or the key of a session. Calls with a session's key are kept in it; calls with the token are only
    answered. `announce=False` does not tell the model of the tools that a call offers, which it is taken to know.
    """

    def __init__(
        self,
        router: Any,
        chat: Chat,
        *,
        sampling: Sampling | None = None,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        announce: bool = True,
    ) -> None:
        self.announce = announce
        self.router, self._chat, self.sampling = router, chat, sampling or Sampling()
        self.model, self.host, self.port, self.token = model, host, port, token or secrets.token_hex(24)
        self._sessions: dict[str, Session] = {}  # by id
        self._keys: dict[str, Session] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """What a client needs besides a key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    # ---- sessions

    @asynccontextmanager
    async def session(
        self, policy: Any = None, *, sampling: Sampling | None = None, limits: Limits | None = None, fixed: bool = True
    ) -> AsyncIterator[Session]:
        """A session for one sample, closed at the end of the block. `policy` is an environment's handle, whose sampling
        the calls have; `fixed` keeps temperature, top-p and top-k so whatever the agent asks for, so that what is
        sampled can be trained on. Lengths and stops are the agent's."""
        session = self.open_session(policy, sampling=sampling, limits=limits, fixed=fixed)
        try:
            yield session
        finally:
            self.close_session(session)

    def open_session(
        self, policy: Any = None, *, sampling: Sampling | None = None, limits: Limits | None = None, fixed: bool = True
    ) -> Session:
        """As `session`, for who closes it himself."""
        now = time.monotonic()
        for old in [s for s in self._sessions.values() if now - s.used > IDLE_S]:
            self.close_session(old)
        default = sampling or getattr(policy, "sampling", None) or self.sampling
        session = Session(
            self.base_url,
            self._chat,
            policy or Bare(self.router, f"gateway {secrets.token_hex(8)}"),
            default,
            limits=limits,
            fixed=fixed,
            announce=self.announce,
        )
        self._sessions[session.id] = self._keys[session.key] = session
        return session

    def close_session(self, session: Session) -> None:
        """Its key is worth nothing from here on."""
        self._sessions.pop(session.id, None)
        self._keys.pop(session.key, None)

    def environment(
        self,
        agent: Callable[..., Any],
        *,
        limits: Limits | None = None,
        reward_deadline_s: float = 60.0,
        fixed: bool = True,
    ) -> Environment:
        """An environment of somebody else's agent: `agent(task, base_url, api_key)`, plain (run in a thread) or async.
        What it returns is the reward (a number, or a number and parts); None waits for one to be posted."""

        async def environment(prompt: Prompt, policy: Any) -> Trajectory:
            async with self.session(policy, limits=limits, fixed=fixed) as session:
                arguments = (prompt, session.base_url, session.key)
                try:
                    if inspect.iscoroutinefunction(agent):
                        outcome = await agent(*arguments)
                    else:
                        outcome = await aside(agent, *arguments)
                except Exception:
                    if session.failure is not None:
                        raise session.failure from None
                    raise
                if outcome is None:
                    return await session.scored(reward_deadline_s)
                reward, parts = outcome if isinstance(outcome, tuple) else (outcome, None)
                return session.trajectory(float(reward), parts)

        environment.in_controller = True  # type: ignore[attr-defined]  (it holds the gateway)
        environment.__name__ = environment.__qualname__ = f"agent({getattr(agent, '__name__', 'agent')})"
        return environment

    # ---- life

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen. Raises MilkweedError where the address is taken."""
        import uvicorn

        class Quiet(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # Ctrl-C is the controller's

        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # named as TCP, else asyncio leaves Nagle's algorithm on, and every answer waits 40 ms
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            raise MilkweedError(
                f"the gateway cannot listen on {self.host}:{self.port}: {error}; give another port (0: any)"
            ) from error
        self.port = listener.getsockname()[1]
        if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            _log.warning(
                "the gateway is open to every machine that reaches %s:%d, for who has its token or a session's key; it is not encrypted",
                self.host,
                self.port,
            )
        config = uvicorn.Config(
            self._app(),
            lifespan="off",
            log_level="warning",
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=2,
            timeout_keep_alive=300,  # the client must be the one who closes: else its next call may meet a closed door
            backlog=2048,
        )
        self._server = Quiet(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway")
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    async def ended(self) -> None:
        """Waits until the server ends. Raises FleetError when no engine is left to serve from."""
        while self._serving is not None and not self._serving.done():
            await asyncio.wait([self._serving], timeout=LOOK_S)
            if hasattr(self.router, "versions") and not self.router.versions():
                raise FleetError("rollout", "died", "no engine is left to serve from")

    async def close(self) -> None:
        """Stop listening. Calls under way get a moment to end."""
        if self._serving is not None:
            self._server.should_exit = True
            _, late = await asyncio.wait([self._serving], timeout=5.0)
            for task in late:
                task.cancel()
            self._serving = None

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._guarded(self._chat_completions), methods=["POST"]),
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{name:path}", self._guarded(self._one_model)),
                Route("/v1/sessions", self._guarded(self._new_session), methods=["POST"]),
                Route("/v1/sessions/{id}/reward", self._guarded(self._post_reward), methods=["POST"]),
                Route("/health", self._health),
            ]
        )

    # ---- requests

    def _guarded(self, handle: Callable[[Request, Session | None], Any]) -> Callable[[Request], Any]:
        """Checks who calls, ends the work when the caller leaves, and makes errors OpenAI's."""
        from starlette.responses import JSONResponse, Response

        async def endpoint(request: Request) -> Response:
            session = None
            try:
                session = self._caller(request)
                if session is not None:
                    session.used = time.monotonic()
                    session.calls += 1
                return await unless_gone(request, handle(request, session))
            except Refused as error:
                refused = error
            except LimitReached as error:
                refused = Refused(str(error), code="limit_reached")
            except (DataError, ValueError) as error:
                refused = Refused(str(error))
            except FleetError as error:
                if session is not None:
                    session.failure = error
                refused = Refused(str(error), status=503, code=error.kind)
            except MilkweedError as error:
                refused = Refused(str(error), status=500)
            except Gone:
                return Response(status_code=499)
            return JSONResponse(refused.body, refused.status)

        return endpoint

    def _caller(self, request: Request) -> Session | None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else request.headers.get("api-key", "")
        session = self._keys.get(key)
        if session is None and not hmac.compare_digest(key.encode(), self.token.encode()):
            raise Refused(
                "this needs the gateway's token or a session's key as a bearer token",
                status=401,
                code="invalid_api_key",
            )
        return session

    async def _body(self, request: Request) -> dict[str, Any]:
        if int(request.headers.get("content-length") or 0) > BODY_BYTES:
            raise Refused(f"a request may have {BODY_BYTES >> 20} MiB", status=413)
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > BODY_BYTES:
                raise Refused(f"a request may have {BODY_BYTES >> 20} MiB", status=413)
        request.state.read = True
        try:
            return msgspec.json.decode(bytes(data), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise Refused(f"the body is not a JSON object: {error}") from error

    async def _chat_completions(self, request: Request, session: Session | None) -> Response:
        body = await self._body(request)
        wire.check_fields(body, fixed=session is not None and session.fixed)
        messages, tools = body.get("messages"), wire.tools_of(body)
        if not isinstance(messages, list) or not messages:
            raise Refused("messages must be a list of at least one message", param="messages")
        sampling, count = self._sampling(body, session), wire.number(body, "n", 1, 128, whole=True) or 1

        async def one() -> Reply:
            if session is not None:
                return await session.chat(messages, tools, sampling)
            return await Threads(self._chat, Bare(self.router).sample, sampling, announce=self.announce).chat(
                messages, tools=tools, sampling=sampling
            )

        return self._send(body, wire.chat_answer(self._chat, self.model, body, await all_of(one, count)))

    async def _completions(self, request: Request, session: Session | None) -> Response:
        body = await self._body(request)
        wire.check_fields(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        ids = self._chat.encode(prompt) if isinstance(prompt, str) else prompt
        known = range(self._chat.vocab_size)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i in known for i in ids):
            raise Refused("prompt must be one text, or one list of token ids", param="prompt")
        sampling, count = self._sampling(body, session), wire.number(body, "n", 1, 128, whole=True) or 1

        async def one() -> Completion:
            work = session.complete if session is not None else Bare(self.router).sample
            return await work(list(ids), sampling)

        return self._send(body, wire.text_answer(self._chat, self.model, body, await all_of(one, count)))

    def _sampling(self, body: dict[str, Any], session: Session | None) -> Sampling:
        if session is None:
            return wire.sampling_of(body, self.sampling, fixed=False)
        return wire.sampling_of(body, session.sampling, fixed=session.fixed)

    def _send(self, body: dict[str, Any], answer: dict[str, Any]) -> Response:
        from starlette.responses import Response, StreamingResponse

        if not body.get("stream"):
            return Response(msgspec.json.encode(answer), media_type="application/json")
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(in_turn(wire.events(answer, usage=usage)), media_type="text/event-stream")

    async def _models(self, request: Request, session: Session | None) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"object": "list", "data": [self._model()]})

    async def _one_model(self, request: Request, session: Session | None) -> Response:
        from starlette.responses import JSONResponse

        if request.path_params["name"] != self.model:
            raise Refused(f"there is one model here: {self.model}", status=404, code="model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        about = {"version": str(self.router.version), "context": self._chat.context}
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "milkweed"} | about

    async def _new_session(self, request: Request, session: Session | None) -> Response:
        from starlette.responses import JSONResponse

        if session is not None:
            raise Refused("a session is opened with the gateway's token", status=403)
        made = self.open_session()
        return JSONResponse({"id": made.id, "key": made.key, "base_url": made.base_url})

    async def _post_reward(self, request: Request, session: Session | None) -> Response:
        from starlette.responses import JSONResponse

        named = self._sessions.get(request.path_params["id"])
        if named is None or session not in (None, named):
            raise Refused(f"no session {request.path_params['id']} of yours", status=404)
        body = await self._body(request)
        parts = body.get("parts") or {}
        if not isinstance(parts, dict):
            raise Refused("parts must be an object of numbers", param="parts")
        named.reward(body.get("reward"), parts)  # type: ignore[arg-type]
        return JSONResponse({"id": named.id, "reward": named.given[0] if named.given else None})

    async def _health(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"status": "ok"})
