"""An OpenAI-compatible endpoint over the router, which keeps the exact tokens of every call made with a session's
key."""

from milkweed.rollout.gateway.server import Gateway
from milkweed.rollout.gateway.sessions import Session

__all__ = ["Gateway", "Session"]
