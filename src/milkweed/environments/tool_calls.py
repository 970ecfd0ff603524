"""Tool calls in the formats that models were taught: what is offered, and what was called, read strictly.

What is not a call exactly as the format says is malformed, and comes back as an error for the policy to read: guessing
what was meant would train the guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

ToolFormat = Literal["hermes", "llama3", "smollm2"]
"""hermes (Qwen3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many as wanted. smollm2: the same
marks around a list of such objects. llama3: the whole message is `{"name": ..., "parameters": {...}}`, several
separated by `;`, with or without `<|python_tag|>` before it."""

OPEN, CLOSE, PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call as the policy wrote it. `raw` is its exact text."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    raw: str = ""


class Parsed(msgspec.Struct, kw_only=True):
    """A message taken apart: what is no call, the calls, and what was wrong. With `errors` there are no calls: a
    message is carried out whole or not at all."""

    content: str
    calls: list[ToolCall] = []
    errors: list[str] = []


def format_of(template: str | None) -> ToolFormat:
    """The format that a chat template speaks; smollm2 where it says nothing of tools."""
    template = template or ""
    if OPEN in template:
        return "hermes"
    return "llama3" if PYTHON in template or "<|start_header_id|>" in template else "smollm2"


def parse(text: str, form: ToolFormat) -> Parsed:
    """Take `text` (one assistant message, without its end token) apart. Marks inside `<think>` are thoughts."""
    thinking, mark, said = text.rpartition("</think>")
    if not mark and text.lstrip().startswith("<think>"):
        return Parsed(content=text)  # it never stopped thinking
    parsed = _llama(said) if form == "llama3" else _marked(said, form)
    if parsed.errors:
        return Parsed(content=text, errors=parsed.errors)
    parsed.content = thinking + mark + parsed.content
    return parsed


def _marked(text: str, form: ToolFormat) -> Parsed:
    content, calls, errors = "", [], []
    rest = text
    while True:
        before, mark, after = rest.partition(OPEN)
        if CLOSE in before:
            errors.append(f"{CLOSE} without {OPEN} before it")
        content += before
        if not mark:
            break
        body, closed, rest = after.partition(CLOSE)
        if not closed:
            errors.append(f"{OPEN} is not closed by {CLOSE}")
            break
        if OPEN in body:
            errors.append(f"{OPEN} inside a tool call")
            continue
        value, error = _json(body)
        listed = isinstance(value, list) and form == "smollm2"
        for item in value if listed else [value]:  # type: ignore[union-attr]
            call, error = (None, error) if error else _call(item, "arguments", body)
            if error:
                errors.append(error)
            elif call:
                calls.append(call)
    return Parsed(content=content, calls=[] if errors else calls, errors=errors)


def _llama(text: str) -> Parsed:
    before, mark, after = text.partition(PYTHON)
    body = after if mark else text
    if not mark and not body.lstrip().startswith('{"name"'):
        return Parsed(content=text)
    calls, rest = [], body.strip()
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return Parsed(content=text, errors=[f"a tool call is not JSON: {_short(error)}"])
        call, wrong = _call(value, "parameters", rest[:end])
        if call is None:
            return Parsed(content=text, errors=[wrong or "not a tool call"])
        calls.append(call)
        rest = rest[end:].strip()
        if rest.startswith(";"):
            rest = rest[1:].strip()
        elif rest and not rest.startswith("{"):
            return Parsed(content=text, errors=[f"text after a tool call: {rest[:40]!r}"])
    if not calls:
        return Parsed(content=text, errors=[f"{PYTHON} without a call"])
    return Parsed(content=before if mark else "", calls=calls)


def _json(body: str) -> tuple[Any, str | None]:
    try:
        return json.loads(body, object_pairs_hook=_no_duplicates, parse_constant=_no_constant), None
    except (ValueError, RecursionError) as error:
        return None, f"a tool call is not JSON: {_short(error)}"


def _short(error: Exception) -> str:
    return str(error).split("\n")[0][:120] or type(error).__name__


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _call(value: Any, key: str, raw: str) -> tuple[ToolCall | None, str | None]:
    if not isinstance(value, dict):
        return None, f"a tool call must be a JSON object, not {_kind(value)}"
    if set(value) != {"name", key}:
        return None, f'a tool call must have the keys "name" and "{key}", not {sorted(value)}'
    if not isinstance(value["name"], str) or not isinstance(value[key], dict):
        return None, f'"name" must be text and "{key}" an object'
    return ToolCall(name=value["name"], arguments=value[key], raw=raw), None


KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _kind(value: Any) -> str:
    return next((name for name, types in reversed(KINDS.items()) if type(value) in types), type(value).__name__)


def check_arguments(value: Any, schema: Mapping[str, Any], where: str = "") -> str | None:
    """What is wrong with `value` by the JSON schema `schema` (type, enum, required, properties, items, anyOf), or None.
    Other keywords are left to the tool."""
    name = where or "arguments"
    if options := schema.get("anyOf"):
        if all(check_arguments(value, option, where) for option in options):
            return f"{name}: {_kind(value)} is none of the kinds allowed"
        return None
    if "enum" in schema and value not in schema["enum"]:
        return f"{name} must be one of {schema['enum']}"
    kinds = schema.get("type")
    names: Sequence[str] = [kinds] if isinstance(kinds, str) else kinds or []
    allowed = {t for k in names for t in KINDS.get(k, ())}
    if allowed and type(value) not in allowed:
        if not (int in allowed and isinstance(value, float) and value.is_integer()):
            return f"{name} must be {' or '.join(names)}, not {_kind(value)}"
    if isinstance(value, dict) and ("properties" in schema or "required" in schema):
        properties = schema.get("properties", {})
        missing = [k for k in schema.get("required", ()) if k not in value]
        if missing:
            return f"{name}: {', '.join(missing)} is missing"
        for key, item in value.items():
            if key not in properties:
                if schema.get("additionalProperties", not where) is False or not where:
                    return f"{name}: there is no {key}; it takes {', '.join(properties) or 'nothing'}"
                continue
            if wrong := check_arguments(item, properties[key], key if not where else f"{where}.{key}"):
                return wrong
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for i, item in enumerate(value):
            if wrong := check_arguments(item, schema["items"], f"{name}[{i}]"):
                return wrong
    return None


def describe(tools: Sequence[Mapping[str, Any]], form: ToolFormat = "smollm2") -> str:
    """The tools in words, for a system message where the chat template has no place for them."""
    lines = "\n".join(json.dumps(t.get("function", t), ensure_ascii=False) for t in tools)
    call = '{"name": ..., "arguments": {...}}'
    call = f"[{call}, ...]" if form == "smollm2" else call
    return (
        "You can call these functions:\n<tools>\n" + lines + "\n</tools>\n"
        f"To call, write JSON between marks: {OPEN}{call}{CLOSE}\nThe results come back as messages of the role tool."
    )
