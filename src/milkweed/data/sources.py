"""Where prompts come from: reasoning-gym by name, JSONL, Hugging Face data set folders, lists, sums of our own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from milkweed.errors import DataError
from milkweed.types import Prompt

Column = str | Callable[[Mapping[str, Any]], Any]
"""A row's key, or a function of the row."""

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def from_list(
    items: Iterable[Prompt | Mapping[str, Any] | tuple[Any, Any] | str], *, name: str = "list"
) -> list[Prompt]:
    """Prompts from values in hand: a `Prompt`, `(question, answer)`, a question, or a mapping with `prompt` (or
    `messages`) and optionally `answer`, `id`, `info`.

    Raises DataError naming the item; also for an id that occurs twice.
    """
    prompts = []
    for i, item in enumerate(items):
        where = f"{name}:{i}"
        if isinstance(item, Prompt):
            prompts.append(item)
        elif isinstance(item, str):
            prompts.append(_prompt(where, where, item, None, {}))
        elif isinstance(item, tuple) and len(item) == 2:
            prompts.append(_prompt(where, where, item[0], item[1], {}))
        elif isinstance(item, Mapping):
            unknown = set(item) - {"prompt", "messages", "answer", "id", "info"}
            if unknown:
                raise DataError(f"{where}: unknown keys {sorted(unknown)}; use prompt (or messages), answer, id, info")
            content = item.get("messages", item.get("prompt"))
            prompts.append(
                _prompt(where, str(item.get("id", where)), content, item.get("answer"), dict(item.get("info") or {}))
            )
        else:
            raise DataError(f"{where}: cannot make a prompt of a {type(item).__name__}")
    return _unique(prompts, name)


def from_jsonl(
    path: str | Path,
    *,
    prompt: Column = "prompt",
    answer: Column | None = "answer",
    id: Column | None = None,
    system: str | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """One prompt a line. `prompt` names the key that holds a question or a list of messages, `answer` the key of the
    answer (None: there is none); either may be a function of the row. The rest of the row goes to `info`.

    Raises DataError naming the file and line.
    """
    path = Path(path)

    def rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
                if not isinstance(row, dict):
                    raise DataError(f"{where}: a {type(row).__name__}, not an object")
                yield where, row

    return _from_rows(rows(), path.name, prompt, answer, id, system, limit)


def from_hf_folder(
    path: str | Path,
    *,
    split: str = "train",
    prompt: Column = "prompt",
    answer: Column | None = "answer",
    id: Column | None = None,
    system: str | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Prompts from a Hugging Face data set on disk: a folder written by `save_to_disk` (of a Dataset or DatasetDict),
    or one with `*.parquet`, `*.arrow` or `*.jsonl` files whose names or folders begin with the split's name, as on
    the hub. Columns as in `from_jsonl`.

    Read with pyarrow alone: importing `datasets` would bring torch and 300 MB into the controller.
    Raises DataError naming folder, split or row.
    """
    folder = Path(path)
    files = _split_files(folder, split)

    def rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for file in files:
            for number, row in enumerate(_table_rows(file)):
                yield f"{file}:{number}", row

    return _from_rows(rows(), f"{folder.name}/{split}", prompt, answer, id, system, limit)


def from_reasoning_gym(name: str, size: int, seed: int, *, system: str | None = None, **config: Any) -> list[Prompt]:
    """`size` tasks of reasoning-gym's data set `name`, generated from `seed` with its own `config`.

    Entry and configuration go to `info["reasoning_gym"]`, where `environments.reasoning_gym_score` finds them.
    Raises DataError naming the data set (with near names) or the configuration key.
    """
    from difflib import get_close_matches

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise DataError(f"reasoning-gym has no data set {name!r}{hint}")
    try:
        data = reasoning_gym.create_dataset(name, size=size, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning-gym {name}: {error}") from error
    prompts = []
    for i in range(size):
        entry = data[i]
        info = {"reasoning_gym": {"name": name, "config": config | {"seed": seed, "size": size}, "entry": dict(entry)}}
        where = f"{name}:{seed}:{i}"
        prompts.append(_prompt(where, where, entry["question"], entry["answer"], info, system))
    return prompts


def arithmetic(
    *,
    digits: int = 2,
    operation: str = "+",
    size: int | None = None,
    seed: int = 0,
    low: int = 0,
    question: str = "What is {a} {op} {b}?",
    answer: str = "{value}",
    system: str | None = None,
) -> list[Prompt]:
    """Sums of two operands `low .. 10**digits - 1`, each ordered pair at most once, in an order drawn from `seed`.

    `question` and `answer` are format strings over a, b, op, value (`"{a:02d}+{b:02d}="`). `size` None gives every
    pair. The unordered pair is the split key: 3+4 and 4+3 fall on the same side of `split`.
    Raises DataError if there are fewer pairs than asked for.
    """
    if operation not in OPERATIONS:
        raise DataError(f"arithmetic: operation {operation!r} is none of {', '.join(OPERATIONS)}")
    count = 10**digits - low
    pairs = count * count if count > 0 else 0
    size = pairs if size is None else size
    if size > pairs or size < 1:
        raise DataError(f"arithmetic: {size} prompts asked for, {pairs} pairs of {low}..{10**digits - 1} exist")
    if size > 5_000_000:
        raise DataError(f"arithmetic: {size} prompts are too many to hold; give a smaller size")
    prompts = []
    for index in random.Random(f"arithmetic:{seed}").sample(range(pairs), size):
        a, b = low + index // count, low + index % count
        values = {"a": a, "b": b, "op": operation, "value": OPERATIONS[operation](a, b)}
        where = f"{a}{operation}{b}"
        key = f"{min(a, b)}{operation}{max(a, b)}"
        info = {"split_key": key, "a": a, "b": b, "value": values["value"]}
        prompts.append(_prompt(where, where, question.format(**values), answer.format(**values), info, system))
    return prompts


def _open(path: Path):
    try:
        return path.open(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _from_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    name: str,
    prompt: Column,
    answer: Column | None,
    id: Column | None,
    system: str | None,
    limit: int | None,
) -> list[Prompt]:
    prompts = []
    used = {c for c in (prompt, answer, id) if isinstance(c, str)}
    for i, (where, row) in enumerate(rows):
        if limit is not None and i >= limit:
            break
        content = _value(row, prompt, where, "prompt")
        reply = None if answer is None else _value(row, answer, where, "answer")
        key = f"{name}:{i}" if id is None else str(_value(row, id, where, "id"))
        info = {k: v for k, v in row.items() if k not in used}
        prompts.append(_prompt(where, key, content, reply, info, system))
    if not prompts:
        raise DataError(f"{name}: no prompts in it")
    return _unique(prompts, name)


def _value(row: Mapping[str, Any], column: Column, where: str, what: str) -> Any:
    if callable(column):
        try:
            return column(row)
        except Exception as error:
            raise DataError(f"{where}: the {what} function raised {type(error).__name__}: {error}") from error
    if column not in row:
        raise DataError(f"{where}: no {column!r} (for {what}=); it has {', '.join(map(str, row))}")
    return row[column]


def _prompt(
    where: str, id: str, content: Any, answer: Any, info: dict[str, Any], system: str | None = None
) -> Prompt:
    if isinstance(content, str):
        messages = [{"role": "user", "content": content}]
    elif isinstance(content, Sequence) and content and all(isinstance(m, Mapping) and "role" in m for m in content):
        # arrow gives every struct the union of all keys, the absent ones None: templates test for their presence
        messages = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in content]
    else:
        raise DataError(f"{where}: the prompt is neither text nor a list of messages with a role: {content!r:.80}")
    if isinstance(content, str) and not content.strip():
        raise DataError(f"{where}: the prompt is empty")
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return Prompt(id=id, messages=messages, answer=answer, info=info)


def _unique(prompts: list[Prompt], name: str) -> list[Prompt]:
    seen: set[str] = set()
    for p in prompts:
        if p.id in seen:
            raise DataError(f"{name}: the id {p.id!r} occurs twice")
        seen.add(p.id)
    return prompts


def _split_files(folder: Path, split: str) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json")["splits"]
        if split not in splits:
            raise DataError(f"{folder}: no split {split!r}; it has {', '.join(splits)}")
        folder = folder / split
    if (folder / "state.json").is_file():
        return [folder / entry["filename"] for entry in _json(folder / "state.json")["_data_files"]]
    found = sorted(p for p in folder.rglob("*") if p.suffix in (".parquet", ".arrow", ".jsonl") and p.is_file())
    chosen = [p for p in found if any(_names(part, split) for part in p.relative_to(folder).parts)]
    if not chosen:
        have = ", ".join(str(p.relative_to(folder)) for p in found[:5]) or "no .parquet, .arrow or .jsonl file"
        raise DataError(f"{folder}: no file of split {split!r}; it holds {have}")
    return chosen


def _names(part: str, split: str) -> bool:
    """`train-00000-of-00002.parquet`, `train.jsonl` and the folder `train` are of split train; `training` is not."""
    return part == split or (part.startswith(split) and part[len(split)] in "-._")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


def _table_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".jsonl":
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise DataError(f"{path}:{number}: not JSON ({error.msg})") from None
        return
    import pyarrow as pa

    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
            return
        with pa.memory_map(str(path)) as source:
            for batch in _arrow_batches(pa, source):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: {error}") from error


def _arrow_batches(pa: Any, source: Any) -> Iterator[Any]:
    """Batches of an arrow stream (what `datasets` writes) or of an arrow file."""
    try:
        reader = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        reader = pa.ipc.open_file(source)
        for i in range(reader.num_record_batches):
            yield reader.get_batch(i)
        return
    yield from reader
