"""Train and held-out prompts that are disjoint by construction: a stable hash of each prompt's key picks its side."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from milkweed.errors import DataError
from milkweed.types import Prompt

Key = Callable[[Prompt], str]


class Split(NamedTuple):
    """Two lists that share no key."""

    train: list[Prompt]
    held_out: list[Prompt]


def normalised_text(prompt: Prompt) -> str:
    """The messages' text with case, spacing and Unicode forms levelled."""
    text = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt.messages)
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text)).strip().casefold()


def split_key(prompt: Prompt) -> str:
    """`info["split_key"]` where the source gave one (for sums: the unordered operands), else the normalised text."""
    key = prompt.info.get("split_key")
    return normalised_text(prompt) if key is None else str(key)


def split(
    prompts: Sequence[Prompt], held_out: float | int = 0.1, *, seed: int = 0, key: Key = split_key
) -> Split:
    """Prompts on two sides, all prompts of one key on the same side.

    `held_out` below 1 is a fraction: the side of a key then depends on the key and `seed` alone, so prompts added
    later do not move the others. A whole number holds out the fewest keys that give at least so many prompts.
    Raises DataError if either side would be empty.
    """
    keyed = [(key(p), p) for p in prompts]
    if isinstance(held_out, float):
        if not 0 < held_out < 1:
            raise DataError(f"held_out={held_out}: a fraction lies between 0 and 1; give a whole number for a count")
        away = {k for k, _ in keyed if _unit(k, seed) < held_out}
    else:
        sizes: dict[str, int] = {}
        for k, _ in keyed:
            sizes[k] = sizes.get(k, 0) + 1
        away, count = set(), 0
        for k in sorted(sizes, key=lambda k: (_unit(k, seed), k)):
            if count >= held_out:
                break
            away.add(k)
            count += sizes[k]
    result = Split([p for k, p in keyed if k not in away], [p for k, p in keyed if k in away])
    if not result.train or not result.held_out:
        raise DataError(
            f"held_out={held_out} of {len(prompts)} prompts ({len({k for k, _ in keyed})} keys) leaves "
            f"{len(result.train)} to train on and {len(result.held_out)} held out; both must have some"
        )
    check_disjoint(*result, key=key)
    return result


def check_disjoint(train: Iterable[Prompt], held_out: Iterable[Prompt], *, key: Key = split_key) -> None:
    """Prove that the two share no key, no text and no id. Raises DataError naming the first pair that does."""
    for what, of in (("key", key), ("text", normalised_text), ("id", lambda p: p.id)):
        seen = {of(p): p.id for p in train}
        for p in held_out:
            if of(p) in seen:
                raise DataError(
                    f"train prompt {seen[of(p)]!r} and held-out prompt {p.id!r} share the {what} {of(p)[:80]!r}"
                )


def _unit(key: str, seed: int) -> float:
    """A number in [0, 1) drawn from the key; the same on every machine and in every run (Python's `hash` is not)."""
    digest = hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
