"""Reward functions and data sets written for other frameworks, taken as they are: TRL, verl, slime and Miles, OpenRLHF.

    reward = mw.compat.trl(their_reward)          # a reward for single_turn, tool_use, score
    prompts = mw.compat.prompts(rows, "verl")     # rows: dictionaries with that framework's columns

The functions are called with one sample at a time, in the reward workers; what they get and may return is what their
own framework gives and takes. Columns that are neither the prompt nor the answer travel in `Prompt.info`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

from milkweed.errors import DataError
from milkweed.types import Prompt

Kind = Literal["trl", "verl", "slime", "openrlhf"]


class _Reward:
    """A function of another framework as a reward; a class, so that it goes to the workers with what it holds."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.fn, self.options = fn, options
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    async def __call__(self, task: Prompt, completion: str) -> Any:
        value = self.call(task, completion)
        return self.read(await value if inspect.isawaitable(value) else value)

    def call(self, task: Prompt, completion: str) -> Any:
        raise NotImplementedError

    def read(self, value: Any) -> Any:
        return _number(value)


class trl(_Reward):
    """TRL: `fn(prompts, completions, **columns) -> list[float]`, every column a list. `conversational` gives prompts
    and completions as messages, as TRL does where the data set's prompts are messages (the default here)."""

    def __init__(self, fn: Callable[..., Any], *, conversational: bool = True) -> None:
        super().__init__(fn, conversational=conversational)

    def call(self, task: Prompt, completion: str) -> Any:
        talk = self.options["conversational"]
        columns = {k: [v] for k, v in task.info.items()}
        for name in ("answer", "solution", "ground_truth"):  # by whichever name the function asks for it
            columns.setdefault(name, [task.answer])
        prompts = [task.messages if talk else task.text]
        completions = [[{"role": "assistant", "content": completion}] if talk else completion]
        given = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": [[]],
            "trainer_state": None,
        } | columns
        return self.fn(**_accepted(self.fn, given))

    def read(self, value: Any) -> Any:
        return _number(_only(value, self.__name__))


class verl(_Reward):
    """verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | {"score": ...,
    ...}`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)

    def call(self, task: Prompt, completion: str) -> Any:
        given = {
            "data_source": task.info.get("data_source", ""),
            "solution_str": completion,
            "ground_truth": task.answer,
            "extra_info": task.info.get("extra_info", {}),
        }
        return self.fn(**_accepted(self.fn, given))

    def read(self, value: Any) -> Any:
        return _parts(value, "score") if isinstance(value, Mapping) else _number(value)


class slime(_Reward):
    """slime and Miles: `async fn(args, sample, **kwargs) -> float | dict`; the sample has prompt, response, label and
    metadata. `args` are whatever the function reads from the command line of its framework; `key` is the entry of a
    dict that is the reward (`--reward-key`)."""

    def __init__(self, fn: Callable[..., Any], *, key: str = "score", **args: Any) -> None:
        super().__init__(fn, key=key, args=args)

    def call(self, task: Prompt, completion: str) -> Any:
        sample = SimpleNamespace(
            prompt=task.messages,
            response=completion,
            label=task.answer,
            metadata=dict(task.info),
            reward=None,
            status="completed",
        )
        return self.fn(SimpleNamespace(**self.options["args"]), sample)

    def read(self, value: Any) -> Any:
        return _parts(value, self.options["key"]) if isinstance(value, Mapping) else _number(value)


class openrlhf(_Reward):
    """OpenRLHF: `reward_func(queries, prompts, labels, **kwargs)`, giving a tensor of rewards, or a dictionary with
    `rewards` and `extra_logs`. A query is the prompt's text and the answer together."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)

    def call(self, task: Prompt, completion: str) -> Any:
        given = {"queries": [task.text + completion], "prompts": [task.text], "labels": [task.answer]}
        return self.fn(**_accepted(self.fn, given))

    def read(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return _number(_only(value, self.__name__))
        logs = {k: _number(_only(v, k)) for k, v in (value.get("extra_logs") or {}).items()}
        return {"reward": _number(_only(value["rewards"], self.__name__))} | logs


def prompts(rows: Iterable[Mapping[str, Any]], kind: Kind, *, prompt: str = "", answer: str = "") -> list[Prompt]:
    """Prompts from `rows` with the columns of a framework's data sets. `prompt` and `answer` name other columns.

    verl: prompt (messages), reward_model.ground_truth, data_source, extra_info. trl: prompt (text or messages), and
    answer, solution or ground_truth. slime: prompt, label, metadata. openrlhf: input or prompt, label or answer. Raises
    DataError naming the row.
    """
    made = []
    for number, row in enumerate(rows):
        where = f"{kind} row {number}"
        asked = _first(row, [prompt] if prompt else ["prompt", "input", "messages"], where)
        if kind == "verl" and not answer:
            model = row.get("reward_model")
            if not isinstance(model, Mapping) or "ground_truth" not in model:
                raise DataError(f"{where}: no reward_model.ground_truth")
            known = model["ground_truth"]
        else:
            names = {"slime": ["label"], "openrlhf": ["label", "answer"]}.get(
                kind, ["answer", "solution", "ground_truth", "label"]
            )
            known = next((row[n] for n in ([answer] if answer else names) if n in row), None)
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(m) for m in asked]
        extra = row.get("extra_info") if isinstance(row.get("extra_info"), Mapping) else {}
        info = {k: v for k, v in row.items() if k not in ("prompt", "input", "messages", prompt)}
        if kind == "slime":
            info |= dict(row.get("metadata") or {})
        name = row.get("id", extra.get("index", number))
        made.append(Prompt(id=str(name), messages=messages, answer=known, info=info))
    if len({p.id for p in made}) < len(made):  # several files number their rows alike
        made = [Prompt(id=f"{p.id}-{i}", messages=p.messages, answer=p.answer, info=p.info) for i, p in enumerate(made)]
    return made


def _first(row: Mapping[str, Any], names: list[str], where: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise DataError(f"{where}: none of the columns {', '.join(names)}; it has {', '.join(map(str, row))}")


def _accepted(fn: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of `given` that `fn` takes by name; all of them where it takes `**kwargs`."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {k: v for k, v in given.items() if k in parameters}


def _only(value: Any, name: str) -> Any:
    """The one entry of a list, array or tensor of one sample."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise ValueError(f"{name} gave {len(value)} values for one sample")
        return value[0]
    return value


def _number(value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        raise ValueError("no reward (None) was given")
    return float(value)


def _parts(value: Mapping[str, Any], key: str) -> dict[str, float]:
    """`value[key]` as the reward, and what else is a number as its parts."""
    if key not in value:
        raise ValueError(f"no {key} among what was returned: {', '.join(map(str, value))}")
    parts = {k: float(v) for k, v in value.items() if k != key and isinstance(v, (int, float))}
    return parts | {"reward": _number(value[key])}
