"""Configuration as msgspec structs: from TOML, from `a.b=value` overrides, from command-line flags.

A field's help is the string literal below it. Every error is a ConfigError that names the key, where it stands and
what to write instead.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from milkweed.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)


def load(cls: type[C], path: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """A `cls` from the TOML file `path` (None: all defaults), then `a.b=value` overrides, later ones winning.

    A value is read as TOML; what is not TOML is a string (`loss=grpo` needs no quotes). Raises ConfigError.
    """
    values, origin = ({}, {}) if path is None else _read(Path(path))
    for text in overrides:
        key, found, raw = text.partition("=")
        if not found or not key.strip():
            raise ConfigError(f"override {text!r}: write it as key=value, for example {_example(cls)}")
        _set(cls, values, key.strip(), raw.strip(), f"override {text!r}")
        origin[key.strip()] = f"override {text!r}"
    return build(cls, values, lambda key: _origin(origin, key, path))


def from_args(cls: type[C], argv: Sequence[str] | None = None, doc: str | None = None) -> C:
    """A `cls` from command-line flags: `--steps 10`, `--steps=10`, `--sampling.temperature 0.8`, `--evaluate`
    and `--no-evaluate`, `--config FILE.toml` below them all. `--help` prints every field with its type, default and
    help, and exits. Raises ConfigError."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "--help" in args or "-h" in args:
        print(usage(cls, doc))
        raise SystemExit(0)
    path: str | None = None
    overrides: list[str] = []
    while args:
        arg = args.pop(0)
        if not arg.startswith("--"):
            raise ConfigError(
                f"argument {arg!r}: options start with --; {suggest(arg, _keys(cls), prefix='--')}see --help"
            )
        flag, given, raw = arg[2:].partition("=")
        key = flag.replace("-", "_")
        if key == "config":
            path = raw if given else _next(args, arg)
            continue
        if key.startswith("no_") and _is_bool(cls, key[3:]) and not given:
            overrides.append(f"{key[3:]}=false")
        elif _is_bool(cls, key) and not given and (not args or args[0].lower() not in ("true", "false")):
            overrides.append(f"{key}=true")
        else:
            overrides.append(f"{key}={raw if given else _next(args, arg)}")
    values, origin = ({}, {}) if path is None else _read(Path(path))
    for text in overrides:
        key, _, raw = text.partition("=")
        place = "option --" + key.replace("_", "-")
        _set(cls, values, key, raw, place)
        origin[key] = place
    return build(cls, values, lambda key: _origin(origin, key, path))


def build(cls: type[C], values: dict[str, Any], where: typing.Callable[[str], str] = lambda key: "") -> C:
    """Check `values` against `cls`. `where(key)` says where a key came from, for the error."""
    _check_keys(cls, values, "", where)
    try:
        return msgspec.convert(_over_defaults(cls, values), cls, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None  # a struct's own check, with its own words
        raise _explain(cls, str(error), values, where) from None


def _over_defaults(cls: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """`values`, each table of it laid over the default that `cls` has for it: one key given in a table leaves the
    others as the recipe set them, not as the table's own class would."""
    merged = dict(values)
    for f in msgspec.structs.fields(cls):
        default, given = _default(f), values.get(f.name)
        if isinstance(default, msgspec.Struct) and isinstance(given, dict):
            beneath = {g.name: getattr(default, g.name) for g in msgspec.structs.fields(type(default))}
            merged[f.name] = msgspec.to_builtins(beneath) | _over_defaults(type(default), given)
    return merged


def _default(f: msgspec.structs.FieldInfo) -> Any:
    if f.default is not msgspec.NODEFAULT:
        return f.default
    return f.default_factory() if f.default_factory is not msgspec.NODEFAULT else msgspec.NODEFAULT


def usage(cls: type[msgspec.Struct], doc: str | None = None) -> str:
    """The text of `--help`: one line a field."""
    rows = [("--config FILE.toml", "read these options from a file first")]
    for key, kind, default, text in _fields(cls):
        shown = f"--{key.replace('_', '-')} {_type_name(kind)}"
        rows.append((shown, " ".join(filter(None, [text, default]))))
    width = min(44, max(len(left) for left, _ in rows))
    lines = [inspect.cleandoc(doc or cls.__doc__ or cls.__name__), ""]
    for left, right in rows:
        body = textwrap.wrap(right, 118 - width) or [""]
        if len(left) > width:
            lines.append(f"  {left}")
            lines += [f"  {'':{width}}  {line}" for line in body]
        else:
            lines += [f"  {left if i == 0 else '':{width}}  {line}" for i, line in enumerate(body)]
    return "\n".join(lines)


def to_toml(config: msgspec.Struct) -> str:
    """`config` as TOML that `load` reads back; fields that are None are left out."""
    return _toml(msgspec.to_builtins(config), "")


def field_docs(cls: type) -> dict[str, str]:
    """The string literals below the fields of `cls` and its bases, by field name. Empty where there is no source."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base in (object, msgspec.Struct):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue  # defined where there is no file, as in some notebooks: help is then without text
        body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in zip(body, body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                if (
                    isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                    and isinstance(below.value.value, str)
                ):
                    found[field.target.id] = " ".join(below.value.value.split())
    return found


# reading


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return values, {key: f"{path}:{line}" for key, line in _lines(text).items()}


def _lines(text: str) -> dict[str, int]:
    """The line of every plain `key =` and `[table]`, by dotted key; enough to point at a mistake."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith("[") and "]" in line:
            table = line.lstrip("[").partition("]")[0].strip()
            found.setdefault(table, number)
        elif "=" in line and not line.startswith("#"):
            key = line.partition("=")[0].strip().strip("\"'")
            found.setdefault(f"{table}.{key}" if table else key, number)
    return found


def _origin(origin: dict[str, str], key: str, path: str | Path | None) -> str:
    """Where `key`, or the nearest table above it, was written."""
    while key:
        if key in origin:
            return origin[key]
        key = key.rpartition(".")[0]
    return str(path) if path is not None else "the defaults"


def _set(cls: type[msgspec.Struct], values: dict[str, Any], key: str, raw: str, place: str) -> None:
    kind = _kind_of(cls, key, place)
    *tables, last = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{place}: {table} is not a table")
    values[last] = _value(raw, kind)


def _value(raw: str, kind: Any) -> Any:
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    if str in options and raw[:1] not in "\"'" or raw == "":
        if type(None) in options and raw.lower() in ("none", ""):
            return None
        return raw
    if raw.lower() in ("none", "null") and type(None) in options:
        return None
    if raw in ("True", "False"):
        return raw == "True"
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return raw


# checking


def _check_keys(kind: Any, values: Any, above: str, where: typing.Callable[[str], str]) -> None:
    cls = _struct(kind)
    if cls is None or not isinstance(values, dict):
        return
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        full = f"{above}{key}"
        if key not in hints or key not in cls.__struct_fields__:
            place = where(full)
            table = f" in [{above[:-1]}]" if above else ""
            known = list(cls.__struct_fields__)
            raise ConfigError(
                f"{place}: unknown key {key!r}{table}: {suggest(key, known)}known keys: {', '.join(known)}"
            )
        _check_keys(hints[key], value, f"{full}.", where)


def _explain(cls: type, message: str, values: Any, where: typing.Callable[[str], str]) -> ConfigError:
    """msgspec says "Expected `int`, got `str` - at `$.a.b`"; say it with the key, its place and its value."""
    what, found, path = message.rpartition(" - at `$")
    if not found:
        missing = message.removeprefix("Object missing required field `").removesuffix("`")
        if missing != message:
            return ConfigError(f"{where(missing)}: {missing!r} is missing; set it (see --help)")
        return ConfigError(f"{where('')}: {message}")
    key = path.rstrip("`").lstrip(".")
    if what.startswith("Object missing required field"):
        return ConfigError(f"{where(key)}: [{key}] lacks {what.partition('`')[2].rstrip('`')!r}; add it")
    plain = key.partition("[")[0]
    value: Any = values
    for part in plain.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    mend = ""
    if isinstance(value, str) and "Invalid enum value" in what:
        choices = [str(c) for c in typing.get_args(_plain(_kind_of(cls, plain, "")))]
        mend = f"; {suggest(value, choices)}choose one of {', '.join(choices)}"
    shown = f" = {json.dumps(value, default=str)}" if value is not None and not isinstance(value, dict) else ""
    return ConfigError(f"{where(plain)}: {key}{shown}: {what[:1].lower()}{what[1:]}{mend}")


def suggest(word: str, known: Sequence[str], prefix: str = "") -> str:
    """`did you mean ...? ` if a known word is close, else nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {prefix + close[0]!r}? " if close else ""


def _kind_of(cls: type[msgspec.Struct], key: str, place: str) -> Any:
    """The type of a dotted key; raises ConfigError for a key that is not there."""
    kind: Any = cls
    seen: list[str] = []
    for part in key.split("."):
        struct = _struct(kind)
        if struct is None:
            if typing.get_origin(_plain(kind)) is dict or _plain(kind) in (dict, Any):
                return Any
            raise ConfigError(f"{place}: {'.'.join(seen)} is a value, not a table")
        if part not in struct.__struct_fields__:
            known = [k for k, *_ in _fields(cls)]
            raise ConfigError(f"{place}: unknown key {key!r}: {suggest(key, known)}known keys: {', '.join(known)}")
        kind = typing.get_type_hints(struct)[part]
        seen.append(part)
    return kind


def _struct(kind: Any) -> type[msgspec.Struct] | None:
    kind = _plain(kind)
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _plain(kind: Any) -> Any:
    """`kind` without Annotated and without `| None`."""
    if typing.get_origin(kind) is typing.Annotated:
        return _plain(typing.get_args(kind)[0])
    if _is_union(kind):
        rest = [k for k in typing.get_args(kind) if k is not type(None)]
        return _plain(rest[0]) if len(rest) == 1 else kind
    return kind


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_bool(cls: type[msgspec.Struct], key: str) -> bool:
    return key in _keys(cls) and _plain(_kind_of(cls, key, "")) is bool


def _keys(cls: type[msgspec.Struct]) -> list[str]:
    return [key for key, *_ in _fields(cls)]


def _fields(
    cls: type[msgspec.Struct], above: str = "", shown: Any = msgspec.NODEFAULT
) -> list[tuple[str, Any, str, str]]:
    """(dotted key, type, default for people, help) of every field that is not a table itself. `shown` is the instance
    whose values are the defaults, where a table has one."""
    rows: list[tuple[str, Any, str, str]] = []
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for f in msgspec.structs.fields(cls):
        kind, inner = hints[f.name], _struct(hints[f.name])
        value = _default(f) if shown is msgspec.NODEFAULT else getattr(shown, f.name)
        if inner is not None:
            rows += _fields(
                inner, f"{above}{f.name}.", value if isinstance(value, msgspec.Struct) else msgspec.NODEFAULT
            )
            continue
        default = "(required)" if value is msgspec.NODEFAULT else f"(default {value})"
        rows.append((above + f.name, kind, default, docs.get(f.name, "")))
    return rows


def _type_name(kind: Any) -> str:
    kind = _plain(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(str(a) for a in typing.get_args(kind))
    return getattr(kind, "__name__", str(kind)) if not _is_union(kind) else str(kind).replace(" ", "")


def _next(args: list[str], flag: str) -> str:
    if not args:
        raise ConfigError(f"option {flag} needs a value")
    return args.pop(0)


def _example(cls: type[msgspec.Struct]) -> str:
    keys = _keys(cls)
    return f"{keys[0]}=..." if keys else "key=..."


def _toml(values: dict[str, Any], above: str) -> str:
    plain = [
        f"{_toml_key(k)} = {_toml_value(v)}" for k, v in values.items() if not isinstance(v, dict) and v is not None
    ]
    parts = ["\n".join(plain)] if plain else []
    for key, value in values.items():
        if isinstance(value, dict):
            name = f"{above}{_toml_key(key)}"
            parts.append(f"[{name}]\n{_toml(value, name + '.')}".rstrip())
    return "\n\n".join(parts) + ("\n" if not above else "")


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(v) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and value != value:
        return "nan"
    return (
        json.dumps(value)
        if not isinstance(value, float) or abs(value) != float("inf")
        else ("inf" if value > 0 else "-inf")
    )
