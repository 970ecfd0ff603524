"""Milkweed: reinforcement-learning post-training of language models from one Python controller.

`import milkweed as mw` gives all of the public API; its parts are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module (attribute of the same name), or "module:" for the module itself
_PUBLIC = {
    # a run and its mesh
    "RunConfig": "runs.config",
    "Run": "runs.run",
    "start": "runs.run",
    "Mesh": "runs.mesh",
    "up": "runs.mesh",
    "MeshConfig": "config",
    "load_mesh": "config",
    "main": "runs.script",
    "run_sync": "runs.script",
    "read_metrics": "observe.metrics",
    "audit": "data.ledger",
    "replay": "runs.replay",
    "show": "observe.show",
    # the policy
    "Trainer": "training.trainer",
    "TrainerConfig": "training.config",
    "Router": "rollout",
    "Gateway": "rollout.gateway",
    "new_qwen3": "models",
    "smollm2_instruct": "models",
    "cached_folder": "models",
    # data
    "Prompt": "types",
    "Sampling": "types",
    "Completion": "types",
    "Trajectory": "types",
    "Group": "types",
    "Batch": "types",
    "Policy": "types",
    "PolicyVersion": "types",
    "PolicyOutput": "types",
    "Loss": "types",
    "Environment": "types",
    "Chat": "data",
    "PromptStream": "data",
    "Split": "data",
    "arithmetic": "data",
    "from_reasoning_gym": "data",
    "from_jsonl": "data",
    "from_hf_folder": "data",
    "from_list": "data",
    "split": "data",
    "pack": "data",
    "pack_pairs": "data",
    "batch": "runs.batch",
    # environments
    "single_turn": "environments.single_turn",
    "tool_use": "environments.classes",
    "from_gym": "environments.classes",
    "gymnasium_env": "environments.gyms",
    "skyrl_env": "environments.gyms",
    "verifiers_env": "environments.gyms",
    "verifiers_prompts": "environments.gyms",
    "nemo_gym_env": "environments.servers",
    "nemo_gym_prompts": "environments.servers",
    "openenv_env": "environments.servers",
    "tool": "environments.tools",
    "Tool": "environments.tools",
    "python_tool": "environments.session",
    "shell_tool": "environments.session",
    "McpServer": "environments.mcp",
    "Limits": "environments.conversation",
    "Conversation": "environments.conversation",
    "Judge": "environments.judge",
    "Endpoint": "environments.judge",
    "Expert": "environments.expert",
    "imitate": "runs.imitation",
    "sample_groups": "runs.sampling",
    "score": "environments.reward",
    "Scorer": "environments.reward",
    "code_tests": "environments.execution",
    "verifiers": "environments.verifiers:",
    "compat": "compat:",
    # algorithms
    "algorithms": "algorithms:",
    # errors
    "MilkweedError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "FleetError": "errors",
    "PeerDied": "errors",
    "DeadlineExceeded": "errors",
    "RemoteError": "errors",
    "TransferError": "errors",
    "RewardError": "errors",
    "EnvironmentFailed": "errors",
    "RunLocked": "errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'milkweed' has no attribute {name!r}")
    module = import_module(f"milkweed.{home.rstrip(':')}")
    value = module if home.endswith(":") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
