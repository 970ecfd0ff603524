"""A model's chat template and tokenizer, read from its folder without importing torch or transformers.

transformers would bring torch and 400 MB into the controller; `tokenizers` and jinja2 need 25 MB and give the same
ids, as a test holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from milkweed.errors import DataError
from milkweed.types import Prompt, Sampling, Trajectory, Turn

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Chat:
    """The tokenizer and chat template of the model in `model_dir`.

    `template` replaces the folder's own (jinja). `options` are handed to the template (`enable_thinking=False`).
    Raises DataError naming the file where one is missing, unreadable, or does not fit the model: a token id beyond
    the model's vocabulary, an end token that the tokenizer does not know.
    """

    def __init__(self, model_dir: str | Path, *, template: str | None = None, **options: Any) -> None:
        self.folder = Path(model_dir)
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such model folder")
        self.options = options
        self._config = _json(self.folder / "config.json", required=True)
        self._settings = _json(self.folder / "tokenizer_config.json")
        self._tokenizer = self._load()
        self.special = self._special_tokens()
        self._check_vocabulary()
        self.eos_ids = self._end_ids()
        source = self._template_source() if template is None else template
        self.template_source = source
        """The chat template's text; None where the folder has none."""
        self._template = None if source is None else _compile(source, self.folder)

    @property
    def vocab_size(self) -> int:
        """Of the model: rows of its embedding."""
        return int(self._text_config("vocab_size") or 0)

    @property
    def context(self) -> int | None:
        """The model's longest sequence, where its configuration says."""
        value = self._text_config("max_position_embeddings")
        return None if value is None else int(value)

    @property
    def eos_id(self) -> int:
        """The id that ends an assistant turn."""
        return self.eos_ids[0]

    @property
    def pad_id(self) -> int:
        """The padding id, or the end token where there is none."""
        pad = self.special.get("pad_token")
        found = None if pad is None else self._tokenizer.token_to_id(pad)
        return self.eos_id if found is None else found

    def text(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, **options: Any) -> str:
        """The messages as the template writes them."""
        if self._template is None:
            raise DataError(
                f"{self.folder}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "give one: Chat(folder, template=...)"
            )
        from jinja2 import TemplateError

        values = {"tools": None, "documents": None, **self.special, **self.options, **options}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **values
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = [m.get("role") for m in messages]
            raise DataError(f"{self.folder}: its chat template refused messages of roles {roles}: {error}") from error

    def ids(
        self, messages: Sequence[dict[str, Any]] | Prompt, *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Token ids of the messages, ending where the assistant is to begin."""
        if isinstance(messages, Prompt):
            messages = messages.messages
        return self.encode(self.text(messages, add_generation_prompt=add_generation_prompt, **options))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special token added; those written in it are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, for people and verifiers. Never tokenise it again: other ids may come back."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        too_long: Literal["error", "drop"] = "error",
    ) -> list[Prompt]:
        """The prompts with `token_ids` filled in.

        `max_tokens` bounds a prompt's length (default: the model's context less one token to sample). A longer one
        raises DataError naming it, or is left out with `too_long="drop"`; an empty rendering always raises.
        """
        limit = max_tokens if max_tokens is not None else (self.context - 1 if self.context else None)
        texts = [self.text(p.messages) for p in prompts]
        out = []
        for prompt, coded in zip(prompts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            ids = coded.ids
            if not ids:
                raise DataError(f"prompt {prompt.id!r}: its messages render to no token")
            if limit is not None and len(ids) > limit:
                if too_long == "drop":
                    continue
                raise DataError(
                    f"prompt {prompt.id!r} has {len(ids)} tokens, more than {limit}"
                    + ("" if max_tokens is not None else f" (the context of {self.folder} less one)")
                    + "; shorten it or pass too_long='drop'"
                )
            out.append(msgspec.structs.replace(prompt, token_ids=ids))
        return out

    def supervised(self, prompt: Prompt, answer: str | None = None) -> Trajectory:
        """`prompt` followed by `answer` (default `prompt.answer`) and the end token as a trajectory to imitate: the
        loss mask is on the answer and the end token. Ids are the prompt's own, then the answer's, so that sampling
        after the same prompt meets the same ids."""
        text = str(prompt.answer if answer is None else answer)
        head = prompt.token_ids or self.ids(prompt)
        tail = [*self.encode(text), self.eos_id]
        n, m = len(head), len(tail)
        return Trajectory(
            token_ids=[*head, *tail],
            loss_mask=[False] * n + [True] * m,
            logprobs=[0.0] * (n + m),
            versions=[],
            turns=[Turn("prompt", 0, n), Turn("assistant", n, n + m)],
            finish_reason="stop",
            sampling=Sampling(max_tokens=m),
            id=prompt.id,
            prompt_id=prompt.id,
            group_id=prompt.id,
            completion=text,
        )

    def require_same_ids(self, other: Chat, what: str) -> None:
        """Raise DataError, naming a token, where the tokenizer of `other` (a teacher's, a reward model's: `what`) gives
        ids another meaning: what one model sampled would be read as something else by the other."""
        mine, theirs = (c._tokenizer.get_vocab(with_added_tokens=True) for c in (self, other))
        wrong = next((t for t, i in mine.items() if theirs.get(t) != i), None)
        if wrong is not None:
            raise DataError(
                f"{what} {other.folder} has another tokenizer than {self.folder}: token {wrong!r} is {theirs.get(wrong)} "
                f"there and {mine[wrong]} here; it must be of the same family"
            )

    def _load(self) -> Any:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"{path}: missing; write it with transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # its own errors are bare Exception
            raise DataError(f"{path}: not a tokenizer ({error})") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _text_config(self, key: str) -> Any:
        nested = self._config.get("text_config")
        return self._config.get(key, nested.get(key) if isinstance(nested, dict) else None)

    def _special_tokens(self) -> dict[str, str]:
        named = {**_json(self.folder / "special_tokens_map.json"), **self._settings}
        out = {}
        for name in SPECIAL:
            value = named.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                out[name] = value
        return out

    def _check_vocabulary(self) -> None:
        if not self.vocab_size:
            raise DataError(f"{self.folder / 'config.json'}: no vocab_size")
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        token, last = max(vocab.items(), key=lambda item: item[1])
        if last >= self.vocab_size:
            raise DataError(
                f"{self.folder / 'tokenizer.json'} does not fit the model: token {token!r} has id {last}, "
                f"vocab_size in {self.folder / 'config.json'} is {self.vocab_size}"
            )

    def _end_ids(self) -> tuple[int, ...]:
        """The tokenizer's end token first (it ends a turn), then those at which the engine stops."""
        ids: list[int] = []
        token = self.special.get("eos_token")
        if token is not None:
            own = self._tokenizer.token_to_id(token)
            if own is None:
                raise DataError(
                    f"{self.folder / 'tokenizer_config.json'}: eos_token {token!r} is not in tokenizer.json"
                )
            ids.append(own)
        generation = _json(self.folder / "generation_config.json")
        for name, value in (
            ("config.json", self._text_config("eos_token_id")),
            ("generation_config.json", generation.get("eos_token_id")),
        ):
            for id in value if isinstance(value, list) else [] if value is None else [value]:
                if not 0 <= id < self.vocab_size or self._tokenizer.id_to_token(id) is None:
                    raise DataError(f"{self.folder / name}: eos_token_id {id} is not a token of tokenizer.json")
                ids.append(id)
        if not ids:
            raise DataError(f"{self.folder}: no end token, neither in tokenizer_config.json nor in config.json")
        return tuple(dict.fromkeys(ids))

    def _template_source(self) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        value = self._settings.get("chat_template") or _json(self.folder / "chat_template.json").get("chat_template")
        if isinstance(value, list):  # several named templates
            named = {t["name"]: t["template"] for t in value}
            return named.get("default")
        return value


def _json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise DataError(f"{path}: missing; is {path.parent} a model folder?")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: a {type(value).__name__}, not an object")
    return value


def _compile(source: str, folder: Path) -> Any:
    """A template in the dialect that model folders use: blocks trimmed, loop controls, sandboxed."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks assistant text for masks, which are made from ids here: write the body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        # jinja's own escapes <, > and & for HTML, which is not what models were trained on
        return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DataError(f"{folder}: its chat template does not parse: {error}") from error
