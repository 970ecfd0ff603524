"""Model folders that speak like Qwen3, Llama 3 and SmolLM2, and a policy that says what a test wrote down."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from milkweed.data import Chat
from milkweed.environments.conversation import Conversation
from milkweed.types import Completion, PolicyVersion, Sampling, VersionSpan

USER = [{"role": "user", "content": "what is 12*12?"}]

# what matters of each: its marks, where tools go, how tool messages are written, what it does to earlier turns
QWEN3 = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{%- for t in tools %}
{{ t | tojson }}
{%- endfor %}
</tools>
Call with <tool_call></tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 < ns.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else
%}{{ m.content }}{% endif %} {%- for c in m.tool_calls or [] %}
<tool_call>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
<|start_header_id|>system<|end_header_id|>

{{ system }}<|eot_id|>
{%- for m in messages %}
{%- if m.role == 'user' and tools and loop.index0 <= 1 %}<|start_header_id|>user<|end_header_id|>

Answer with {"name": ..., "parameters": ...} to call:
{%- for t in tools %}
{{ t | tojson }}
{%- endfor %}

{{ m.content | trim }}<|eot_id|>
{%- elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- elif m.role != 'system' %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

SMOLLM2 = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are a small helper.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MODELS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # template, special tokens (the first ends a turn), tokens that are whole but not special
    "qwen3": (
        QWEN3,
        ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "llama3": (
        LLAMA3,
        ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|begin_of_text|>", "<|eom_id|>"),
        (),
    ),
    "smollm2": (SMOLLM2, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), ()),
}


def chat_like(name: str, folder: Path, context: int = 4096) -> Chat:
    """A `Chat` of bytes with some merges (`ll`, `lo`, `\\n\\n`, ...), so that other boundaries give other ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    template, special, whole = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("l", "l"),
        ("h", "e"),
        ("he", "ll"),
        ("hell", "o"),
        ("Ċ", "Ċ"),
        ("a", "n"),
        ("an", "s"),
        ("Ġ", "Ġ"),
        ("1", "2"),
    ]
    tokens = [*special, *whole, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in whole])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [0, tokens.index("<|endoftext|>" if "<|endoftext|>" in tokens else "<|eom_id|>")]
    config = {"vocab_size": len(tokens) + 8, "max_position_embeddings": context, "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": special[0], "bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template.lstrip("\n"))
    return Chat(folder)


class Scripted:
    """Says the next of `lines` each time, or what `lines(ids, text)` gives; stands for the router. A line that ends in
    "…" was cut at its length; one that is a list of ids is said as it is."""

    version = PolicyVersion(0, 3)

    def __init__(self, chat: Chat, lines: Sequence[Any] | Callable[[str], str]) -> None:
        self.chat, self.lines, self.asked = chat, lines, []

    async def sample(self, token_ids: Sequence[int], sampling: Sampling, **_: Any) -> Completion:
        text = self.chat.decode(token_ids, skip_special_tokens=False)
        said = self.lines(text) if callable(self.lines) else self.lines[len(self.asked)]
        self.asked.append(list(token_ids))
        cut = isinstance(said, str) and said.endswith("…")
        ids = (
            list(said)
            if isinstance(said, list)
            else self.chat.encode(said.rstrip("…")) + ([] if cut else [self.chat.eos_id])
        )
        if len(ids) > sampling.max_tokens:
            ids, cut = ids[: sampling.max_tokens], True
        return Completion(
            prompt_ids=list(token_ids),
            token_ids=ids,
            logprobs=[-0.125 * (i + 1) for i in range(len(ids))],
            finish_reason="length" if cut else "stop",
            versions=[VersionSpan(0, len(ids), self.version)] if ids else [],
            sampling=sampling,
            text=self.chat.decode(ids),
            engine="rollout0",
        )


def times(a: int, b: int) -> int:
    """Multiplies."""
    return a * b


def talk_of(chat, lines, messages=USER, **kw):
    router = Scripted(chat, lines)
    kw.setdefault("sampling", Sampling(max_tokens=512))
    return Conversation(chat, router.sample, messages, **kw), router


def play(chat, lines, work, **kw):
    async def run():
        talk, router = talk_of(chat, lines, **kw)
        return await work(talk), talk, router

    return asyncio.run(run())


async def through(talk):
    async for reply in talk:
        await talk.run_tools(reply)
    return talk.trajectory(reward=1.0)


def check_exact(t, router, chat):
    """Every prompt that the engine was given is a prefix of the trajectory, and the mask is on what it answered."""
    sampled = [i for s in t.sequences for i, m in zip(s.token_ids, s.loss_mask, strict=True) if m]
    assert len(sampled) == t.sampled
    for s in t.sequences:
        covered = [p for span in s.versions for p in range(span.start, span.end)]
        assert covered == [i for i, m in enumerate(s.loss_mask) if m]
        assert all(lp == 0 for lp, m in zip(s.logprobs, s.loss_mask, strict=True) if not m)
        spans = [(a.start, a.end) for a in s.turns]
        assert spans[0][0] == 0 and spans[-1][1] == len(s.token_ids)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    for ids in router.asked:
        assert any(s.token_ids[: len(ids)] == ids for s in t.sequences)
