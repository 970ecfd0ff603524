"""Which variables of the environment hold credentials: whoever runs other people's code does not get them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from milkweed.fleet.processes import TOKEN_VAR

WORDS = frozenset(
    ("TOKEN", "TOKENS", "KEY", "KEYS", "APIKEY", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "AUTH")
)
ROLES = ("reward", "environment")
"""The roles that run code of environments, rewards and tools."""


def looks_secret(name: str) -> bool:
    """By one of the words in its name. The fleet's own token names a run, and opens nothing to who is not its user."""
    return name != TOKEN_VAR and not WORDS.isdisjoint(name.upper().split("_"))


def emptied(environment: Mapping[str, str], allowed: Collection[str] = ()) -> dict[str, str]:
    """What has to be laid over `environment` to take its credentials away; `drop_empty` finishes it in the process."""
    return {name: "" for name in environment if looks_secret(name) and name not in allowed}


def drop_empty(environment: dict[str, str]) -> None:
    """Remove what was emptied."""
    for name in [n for n, value in environment.items() if not value and looks_secret(n)]:
        del environment[name]
