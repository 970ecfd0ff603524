"""Prompts, their rendering and splitting, and the packing of trajectories into batches."""

from milkweed.data.packing import pack, pack_pairs, packable
from milkweed.data.sources import arithmetic, from_hf_folder, from_jsonl, from_list, from_reasoning_gym
from milkweed.data.split import Split, check_disjoint, split, split_key
from milkweed.data.stream import PromptStream, fingerprint
from milkweed.data.tokenizer import Chat

__all__ = [
    "Chat",
    "PromptStream",
    "Split",
    "arithmetic",
    "check_disjoint",
    "fingerprint",
    "from_hf_folder",
    "from_jsonl",
    "from_list",
    "from_reasoning_gym",
    "pack",
    "pack_pairs",
    "packable",
    "split",
    "split_key",
]
