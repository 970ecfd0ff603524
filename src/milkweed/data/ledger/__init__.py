"""The ledger: an index of every sample of a run, with its tokens in append-only segments."""

from milkweed.data.ledger.audit import Report, audit
from milkweed.data.ledger.ledger import Ledger
from milkweed.data.ledger.records import HeldGroup, Issue, Model, Resumed

__all__ = ["HeldGroup", "Issue", "Ledger", "Model", "Report", "Resumed", "audit"]
