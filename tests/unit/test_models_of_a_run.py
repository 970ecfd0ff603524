"""The models that a run may have beside its policy: what cannot be is refused before any process starts."""

from __future__ import annotations

import asyncio
import json

import pytest

import milkweed as mw
from milkweed.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mw.new_qwen3(tmp_path_factory.mktemp("model"), hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32)


def up(model, **models):
    return asyncio.run(mw.up("local", model=model, **models))


def test_degrees_of_a_critic_are_the_mesh_files_to_say(model):
    with pytest.raises(ConfigError, match=r"critic\.tensor_parallel is the mesh file's to say.*\[critic\]"):
        up(model, critic=mw.TrainerConfig(tensor_parallel=2))


def test_a_policy_is_no_reward_model(model):
    with pytest.raises(DataError, match=r"no value head \(score.weight\)"):
        up(model, reward_model=model)


@pytest.mark.parametrize("role", ["reference", "reward_model", "critic_model"])
def test_a_model_of_another_tokenizer_is_refused(role, model, tmp_path):
    mw.new_qwen3(tmp_path, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=32)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match=rf"{role.removesuffix('_model') if role[0] == 'c' else role} .* has another tokenizer"):
        up(model, **{role: tmp_path})
