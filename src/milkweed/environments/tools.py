"""Tools that a policy may call: plain functions with a schema made from their signature, run within a deadline.

What the policy did wrong (an unknown name, wrong arguments, a function that raised on them) is an observation for it to
read. What is the tool's own fault (its server is gone) raises EnvironmentFailed, and the trajectory is not trained.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from milkweed.environments.aside import aside
from milkweed.environments.tool_calls import ToolCall, check_arguments
from milkweed.errors import ConfigError, MilkweedError

SHOWN = 8000
"""Characters of an observation that the policy gets to see."""


class Tool:
    """A function with its description. `parameters` is the JSON schema of its arguments.

    An async `fn` runs in the event loop, a plain one in a thread; either is given up after `deadline_s`, but a thread
    that hangs stays: what may hang belongs into `python_tool`, `shell_tool` or a process of its own. `fn` None is a
    tool that somebody else carries out (an agent behind the gateway).
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        parameters: Mapping[str, Any] | None = None,
        fn: Callable[..., Any] | None = None,
        *,
        deadline_s: float | None = 10.0,
    ) -> None:
        self.name, self.description, self.fn, self.deadline_s = name, description, fn, deadline_s
        self.parameters = dict(parameters or {"type": "object", "properties": {}})

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's API lists tools, and chat templates take them."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def session(self, shared: dict[Any, Any]) -> Tool:
        """The tool for one trajectory; those with state give a new one each. `shared` is the trajectory's own, for
        tools that share a state."""
        return self

    async def close(self) -> None:
        """Ends what the session holds."""

    async def run(self, arguments: dict[str, Any]) -> str:
        """The observation. Raises whatever the function raises."""
        if self.fn is None:
            raise ConfigError(f"tool {self.name} has only a schema here; whoever gave it must carry it out")
        if inspect.iscoroutinefunction(self.fn):
            value = await self.fn(**arguments)
        else:
            value = await aside(self.fn, **arguments)
            if inspect.isawaitable(value):
                value = await value
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def tool(fn: Callable[..., Any], *, name: str = "", deadline_s: float = 10.0) -> Tool:
    """`fn` as a tool: its docstring tells what it does, its annotations what it takes. Raises ConfigError for a
    parameter that JSON cannot carry."""
    properties, required = {}, []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {fn.__name__}: parameter {parameter.name} must be one that is given by name")
        properties[parameter.name] = _schema(
            _hint(fn, parameter.annotation), f"tool {fn.__name__}: parameter {parameter.name}"
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name or fn.__name__, inspect.getdoc(fn) or "", parameters, fn, deadline_s=deadline_s)


def _hint(fn: Any, annotation: Any) -> Any:
    """The annotation as a type; one whose names are not to be found where `fn` was defined says nothing."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), fn.__globals__)["it"]
    except (NameError, AttributeError):
        return Any


_KINDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    if hint is inspect.Parameter.empty or hint is Any:
        return {}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(a, where) for a in arguments]}
    if origin in (list, Sequence) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return {"type": "array", **({"items": _schema(arguments[0], where)} if arguments else {})}
    kind = _KINDS.get(origin or hint)
    if kind is None:
        raise ConfigError(
            f"{where} is annotated {hint!r}, which JSON cannot carry; use str, int, float, bool, list, dict or Literal"
        )
    return {"type": kind}


def as_tools(given: Sequence[Any]) -> list[Tool]:
    """Tools from what people write: functions, `Tool`s, and schemas as OpenAI's API has them (which cannot be run)."""
    made = []
    for item in given:
        if isinstance(item, Tool):
            made.append(item)
        elif isinstance(item, Mapping):
            about = item.get("function", item)
            if not isinstance(about, Mapping) or not isinstance(about.get("name"), str):
                raise ConfigError(f"not a tool: {str(item)[:80]}; a schema needs function.name")
            made.append(Tool(about["name"], about.get("description") or "", about.get("parameters")))
        elif callable(item):
            made.append(tool(item))
        else:
            raise ConfigError(f"not a tool: {item!r:.80}; give a function, a Tool or a schema")
    names = [t.name for t in made]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ConfigError(f"two tools are named {', '.join(sorted(twice))}")
    return made


async def observe(tools: Mapping[str, Tool], call: ToolCall) -> str:
    """Carries out `call`. What comes back is always something to read; only a MilkweedError (the tool is broken, not
    the call) passes through."""
    found = tools.get(call.name)
    if found is None:
        return f"error: there is no tool {call.name!r}; there are {', '.join(sorted(tools)) or 'none'}"
    if wrong := check_arguments(call.arguments, found.parameters):
        return f"error: {call.name}: {wrong}"
    try:
        async with asyncio.timeout(found.deadline_s):
            seen = await found.run(call.arguments)
    except TimeoutError:
        return f"error: {call.name} took longer than {found.deadline_s:g} s"
    except MilkweedError:
        raise
    except Exception as error:  # whatever a tool raises on the policy's arguments, the policy reads
        return f"error: {type(error).__name__}: {error}"[:SHOWN]
    return shortened(seen)


def shortened(text: str, most: int = SHOWN) -> str:
    """`text`, its middle left out where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
