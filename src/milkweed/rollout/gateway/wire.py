"""OpenAI's requests and answers: what is taken and said over the wire, as pure functions on JSON values.

What cannot be done exactly (penalties, forced tools, other tokens' log-probs) is refused by name, not ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from milkweed.data.tokenizer import Chat
from milkweed.environments.conversation import Reply
from milkweed.errors import MilkweedError
from milkweed.types import Completion, Sampling


class Refused(MilkweedError):
    """A request that gets an error: `status` is HTTP's, `param` the field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        kind = kind if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "prediction": (None,),
    "modalities": (None, ["text"]),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "web_search_options": (None,),
}
"""Fields that are taken only where they change nothing."""


def check_fields(body: dict[str, Any], *, fixed: bool = False) -> None:
    """Raises Refused for a field whose value cannot be honoured. `fixed` takes a demand for a tool call as leave to make
    one: decoding that forces a call would not sample what is trained."""
    for name, values in NEUTRAL.items():
        if body.get(name) not in values:
            raise Refused(f"{name} = {str(body[name])[:60]} is not supported here", param=name)
    choice = body.get("tool_choice")
    demands = choice == "required" or isinstance(choice, dict)
    if choice not in (None, "auto", "none") and not (fixed and demands):
        raise Refused(
            'tool_choice can be "auto" or "none": what the policy calls is its own to choose (the session of a '
            'trajectory takes "required" and a function\'s name too, as "auto")',
            param="tool_choice",
        )


def number(body: dict[str, Any], name: str, least: float, most: float, whole: bool = False) -> Any:
    """Field `name`, or None. Raises Refused where it is no number of the range."""
    value = body.get(name)
    if value is None:
        return None
    good = isinstance(value, int) if whole else isinstance(value, (int, float))
    if isinstance(value, bool) or not good or not least <= value <= most:
        raise Refused(
            f"{name} must be {'a whole number' if whole else 'a number'} from {least:g} to {most:g}, not {str(value)[:40]}",
            param=name,
        )
    return value


def sampling_of(body: dict[str, Any], default: Sampling, *, fixed: bool) -> Sampling:
    """What the request asks for, over `default`. `fixed` keeps temperature, top-p and top-k as they are (and the seed
    aside): the support that a run trains on is the run's to say, not the agent's."""
    found: dict[str, Any] = {}
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := number(body, name, 1, 1 << 20, whole=True)) is not None:
            found["max_tokens"] = value
            break
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(s, str) and s for s in stops):
        raise Refused("stop must be text or a list of texts", param="stop")
    if stops:
        found["stop"] = (*default.stop, *stops)
    asked = {
        "temperature": number(body, "temperature", 0, 10),
        "top_p": number(body, "top_p", 1e-6, 1),
        "top_k": number(body, "top_k", -1, 1 << 20, whole=True),
        "seed": number(body, "seed", -(1 << 63), 1 << 63, whole=True),
    }
    if asked["top_k"] == -1:
        asked["top_k"] = 0
    if not fixed:
        found |= {k: v for k, v in asked.items() if v is not None}
    return msgspec.structs.replace(default, **found)


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools offered. Raises Refused where one is not a function with a name."""
    tools = body.get("tools") or []
    if body.get("tool_choice") == "none":
        return []
    for t in tools if isinstance(tools, list) else [tools]:
        function = t.get("function") if isinstance(t, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or t.get("type", "function") != "function"
        ):
            raise Refused("tools must be functions: {'type': 'function', 'function': {'name': ...}}", param="tools")
    return tools


def _bytes(chat: Chat, token: int) -> dict[str, Any]:
    text = chat.decode([token], skip_special_tokens=False)
    return {"token": text, "bytes": list(text.encode())}


def chat_logprobs(chat: Chat, completion: Completion) -> dict[str, Any]:
    """The log-prob of every sampled token, the end token's too."""
    rows = zip(completion.token_ids, completion.logprobs, strict=True)
    return {"content": [_bytes(chat, i) | {"logprob": lp, "top_logprobs": []} for i, lp in rows], "refusal": None}


def finish_of(reply: Reply | None, completion: Completion) -> str:
    """OpenAI's word for how it ended. Raises Refused where it was cut short by us."""
    if completion.finish_reason not in ("stop", "length"):
        cause = completion.error or completion.finish_reason
        raise Refused(f"sampling was cut short: {cause}", status=503, code=completion.finish_reason)
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if reply is not None and reply.tool_calls else "stop"


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    prompt, said = len(completions[0].prompt_ids), sum(len(c.token_ids) for c in completions)
    cached = {"cached_tokens": min(prompt, completions[0].cached_tokens)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": cached,
    }


def _exact(body: dict[str, Any], completion: Completion) -> dict[str, Any]:
    """With `return_token_ids` (not OpenAI's): the ids and the versions that sampled them."""
    if not body.get("return_token_ids"):
        return {}
    versions = [[s.start, s.end, str(s.version)] for s in completion.versions]
    return {"prompt_token_ids": completion.prompt_ids, "token_ids": completion.token_ids, "versions": versions}


def chat_answer(chat: Chat, model: str, body: dict[str, Any], replies: Sequence[Reply]) -> dict[str, Any]:
    """The answer to /v1/chat/completions."""
    choices = []
    for i, reply in enumerate(replies):
        message = {
            **reply.message,
            "content": reply.text if reply.text or not reply.tool_calls else None,
            "refusal": None,
        }
        logprobs = chat_logprobs(chat, reply.completion) if body.get("logprobs") else None
        finish = finish_of(reply, reply.completion)
        choices.append(
            {"index": i, "message": message, "finish_reason": finish, "logprobs": logprobs}
            | _exact(body, reply.completion)
        )
    return _head("chatcmpl", "chat.completion", model) | {
        "choices": choices,
        "usage": usage_of([r.completion for r in replies]),
    }


def text_answer(chat: Chat, model: str, body: dict[str, Any], completions: Sequence[Completion]) -> dict[str, Any]:
    """The answer to /v1/completions."""
    choices = []
    for i, c in enumerate(completions):
        logprobs = None
        if body.get("logprobs") is not None and body.get("logprobs") is not False:
            tokens = [chat.decode([t], skip_special_tokens=False) for t in c.token_ids]
            starts = [sum(map(len, tokens[:n])) for n in range(len(tokens))]
            logprobs = {"tokens": tokens, "token_logprobs": c.logprobs, "top_logprobs": None, "text_offset": starts}
        choices.append(
            {"index": i, "text": c.text, "finish_reason": finish_of(None, c), "logprobs": logprobs} | _exact(body, c)
        )
    return _head("cmpl", "text_completion", model) | {"choices": choices, "usage": usage_of(completions)}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def events(answer: dict[str, Any], *, usage: bool) -> Iterator[bytes]:
    """`answer` as a stream of server-sent events, in the pieces that OpenAI's clients join."""
    chat = answer["object"] == "chat.completion"
    head = {k: answer[k] for k in ("id", "created", "model")} | {
        "object": "chat.completion.chunk" if chat else "text_completion"
    }

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return (
            b"data: "
            + msgspec.json.encode(head | {"choices": choices, **({"usage": None} if usage else {})} | more)
            + b"\n\n"
        )

    for choice in answer["choices"]:
        rest = {k: v for k, v in choice.items() if k in ("prompt_token_ids", "token_ids", "versions")}
        if not chat:
            yield event([choice])
            continue
        message, i = choice["message"], choice["index"]

        def piece(delta: dict[str, Any], i: int = i, **more: Any) -> bytes:
            return event([{"index": i, "delta": delta, "finish_reason": None, "logprobs": None} | more])

        yield piece({"role": "assistant", "content": ""})
        if message["content"] or choice["logprobs"]:
            yield piece({"content": message["content"] or ""}, logprobs=choice["logprobs"])
        for n, call in enumerate(message.get("tool_calls", ())):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield piece(
                {
                    "tool_calls": [
                        {"index": n, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
                    ]
                }
            )
            yield piece({"tool_calls": [{"index": n, "function": {"arguments": arguments}}]})
        yield piece({}, finish_reason=choice["finish_reason"], **rest)
    if usage:
        yield event([], usage=answer["usage"])
    yield b"data: [DONE]\n\n"
