"""Configuration as msgspec structs, from TOML, overrides and flags; errors name the key, its place and the mend."""

from milkweed.config.mesh import (
    EngineConfig,
    FaultsConfig,
    HostsConfig,
    MeshConfig,
    Place,
    RewardConfig,
    TrainerConfig,
    load_mesh,
    mesh_files,
)
from milkweed.config.reading import build, field_docs, from_args, load, to_toml, usage

__all__ = [
    "EngineConfig",
    "FaultsConfig",
    "HostsConfig",
    "MeshConfig",
    "Place",
    "RewardConfig",
    "TrainerConfig",
    "build",
    "field_docs",
    "from_args",
    "load",
    "load_mesh",
    "mesh_files",
    "to_toml",
    "usage",
]
