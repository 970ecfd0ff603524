"""What a function is made of: the source of it and of all it calls that is ours or the user's, to be compared later."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


class Part(msgspec.Struct, frozen=True):
    """One function or class: its name, the module it is imported as ("" from a script or a cell), its file, and its
    source as it stands there."""

    name: str
    module: str
    file: str
    source: str


@functools.cache
def _packages() -> tuple[Path, ...]:
    return tuple(Path(sysconfig.get_paths()[key]).resolve() for key in ("purelib", "platlib"))


def installed(module: Any) -> bool:
    """Whether a rank can import `module` by itself: the standard library, an installed package, or ours."""
    if module.__name__.split(".")[0] in (sys.stdlib_module_names | {"milkweed"}):
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ != "__main__"
    return any(root in Path(file).resolve().parents for root in _packages())


def unwrap(function: Any) -> Any:
    """What is inside partials and decorators."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def source_text(thing: Any) -> str:
    """Its source; a comment that says so where there is none."""
    inner = unwrap(thing)
    try:
        return inspect.getsource(inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner))
    except (OSError, TypeError):
        return f"# the source of {getattr(inner, '__qualname__', type(inner).__qualname__)} is not available"


def parts(function: Any) -> tuple[list[Part], str]:
    """The parts of `function`, itself first, and a hash over their sources and the plain values it holds (of closures,
    partials and defaults). Other people's packages are not followed."""
    found: dict[tuple[str, str], Part] = {}
    digest = hashlib.sha256()
    for thing, is_part in _walk(function):
        if not is_part:
            digest.update(repr(thing).encode() + b"\0")
            continue
        part = _part(thing)
        found.setdefault((part.module, part.name), part)
    for part in sorted(found.values(), key=lambda p: (p.module, p.name)):
        digest.update(_digest(part))
    return list(found.values()), digest.hexdigest()


@functools.lru_cache(maxsize=512)
def _digest(part: Part) -> bytes:
    return hashlib.sha256(f"{part.name}\0{textwrap.dedent(part.source)}".encode()).digest()


@functools.lru_cache(maxsize=512)
def _part(thing: Any) -> Part:
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    module = getattr(thing, "__module__", "") or ""
    try:
        file = inspect.getsourcefile(thing) or ""
    except TypeError:
        file = ""
    if module in sys.modules and not _importable(module):
        module = ""
    return Part(name, module, file, source_text(thing))


def _importable(module: str) -> bool:
    return module != "__main__" and getattr(sys.modules[module], "__spec__", None) is not None


def _followed(thing: Any) -> bool:
    """Ours or the user's: a function or class whose source may change without a package being installed anew."""
    if not isinstance(thing, (types.FunctionType, type)):
        return False
    name = getattr(thing, "__module__", "") or ""
    if name.split(".")[0] == "milkweed":
        return True
    module = sys.modules.get(name)
    return module is None or not installed(module)


def _walk(function: Any) -> Iterator[tuple[Any, bool]]:
    """`(part, True)` for each function and class reached, `(value, False)` for each plain value, in a fixed order."""
    seen: set[int] = set()
    pending: list[Any] = [function]
    while pending:
        thing = pending.pop()
        if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
            yield thing, False
        elif isinstance(thing, (tuple, list)):
            pending += reversed(thing)
        elif isinstance(thing, dict):
            pending += [x for pair in sorted(thing.items(), key=lambda kv: str(kv[0]), reverse=True) for x in reversed(pair)]
        elif id(thing) in seen:
            continue
        elif isinstance(thing, functools.partial):
            seen.add(id(thing))
            pending += [thing.keywords, thing.args, thing.func]
        elif isinstance(thing, types.MethodType):
            pending += [thing.__self__, thing.__func__]
        elif _followed(thing):
            seen.add(id(thing))
            yield thing, True
            pending += reversed(_reached(thing))
        elif type(thing).__module__ != "builtins" and callable(thing) and _followed(type(thing)):
            seen.add(id(thing))  # an object that is called: its class, and what it holds
            pending += [vars(thing) if hasattr(thing, "__dict__") else None, type(thing)]


def _reached(thing: Any) -> list[Any]:
    if isinstance(thing, type):
        return [m for _, m in sorted(vars(thing).items()) if isinstance(m, types.FunctionType)]
    function = inspect.unwrap(thing)
    cells = [c.cell_contents for c in function.__closure__ or () if _filled(c)]
    values = [function.__globals__[n] for n in _names(function.__code__) if n in function.__globals__]
    reached = list(cells) + [function.__defaults__, function.__kwdefaults__]
    for value in values:
        if isinstance(value, types.ModuleType):
            if value.__name__.split(".")[0] == "milkweed" or not installed(value):
                reached += [m for n in _names(function.__code__) if _followed(m := getattr(value, n, None))]
        elif _followed(value) or callable(value) or isinstance(value, (bool, int, float, str)):
            reached.append(value)
    return reached


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=512)
def _names(code: types.CodeType) -> list[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
    return sorted(names)


def changed(recorded: list[Part]) -> str:
    """How the sources on disk now differ from the `recorded` ones, as a diff; "" where they do not. What came from a
    cell, or from a file that is gone, went with the function itself and has nothing to differ from."""
    differences = []
    for part in recorded:
        text = _text(part)
        if text is None or part.source in text:
            continue
        now = _now(text, part.name)
        lines = difflib.unified_diff(
            textwrap.dedent(part.source).splitlines(), textwrap.dedent(now).splitlines(), f"{part.name} as it trained", f"{part.name} in {part.file} now", lineterm=""
        )
        differences.append("\n".join(lines))
    return "\n".join(differences)


def _text(part: Part) -> str | None:
    file = Path(part.file)
    if part.module:
        try:
            spec = importlib.util.find_spec(part.module)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.origin:
            file = Path(spec.origin)
    return file.read_text(errors="replace") if part.file and file.is_file() else None


def _now(text: str, name: str) -> str:
    """The source of the function or class `name` (as in `__qualname__`) in `text`."""
    try:
        node: Any = ast.parse(text)
    except SyntaxError:
        return ""
    for step in name.replace(".<locals>", "").split("."):
        inner = [n for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name == step]
        if not inner:
            return ""
        node = inner[0]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"
