"""Configuration is read whole, and a mistake in it is explained where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from milkweed import config
from milkweed.errors import ConfigError


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 1.0
    """Divides the logits."""
    stop: list[str] = []


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Train a model."""

    steps: int = 100
    """Optimiser steps
    in all."""
    lr: float = 1e-3
    model: str
    """Folder of the model."""
    loss: Literal["grpo", "dapo"] = "grpo"
    evaluate: bool = True
    limit: int | None = None
    note: str | None = None
    sampling: Sampling = Sampling()
    options: dict[str, int] = {}


def refuse(*args: str) -> str:
    with pytest.raises(ConfigError) as raised:
        config.from_args(Recipe, args)
    return str(raised.value)


def test_flags_set_fields_of_every_kind() -> None:
    got = config.from_args(
        Recipe,
        "--steps 10 --model=/m/3 --lr 1e-4 --loss dapo --no-evaluate --limit 5 --note 12 --sampling.temperature 0 "
        "--options.depth 3".split()
        + ["--sampling.stop", '["a", "b"]'],
    )
    assert got == Recipe(
        steps=10, model="/m/3", lr=1e-4, loss="dapo", evaluate=False, limit=5, note="12",
        sampling=Sampling(temperature=0.0, stop=["a", "b"]), options={"depth": 3},
    )  # fmt: skip
    assert config.from_args(Recipe, ["--model", "m", "--evaluate", "--limit", "none"]) == Recipe(model="m")


def test_later_sources_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('model = "m"\nsteps = 5\n[sampling]\ntemperature = 0.7\n')
    assert config.load(Recipe, file).sampling.temperature == 0.7
    got = config.load(Recipe, file, ["steps=6", "steps=7", "sampling.temperature=1"])
    assert (got.steps, got.sampling.temperature, got.model) == (7, 1.0, "m")
    assert config.from_args(Recipe, ["--config", str(file), "--steps", "8"]).steps == 8


def test_a_configuration_written_out_reads_back_the_same(tmp_path: Path) -> None:
    first = Recipe(model='a "b"\n\\', sampling=Sampling(stop=["x\n", "ü"]), options={"a b": 1, "c": 2}, lr=1e-5)
    file = tmp_path / "r.toml"
    file.write_text(config.to_toml(first))
    assert config.load(Recipe, file) == first
    mesh = config.load_mesh("node8")
    file.write_text(config.to_toml(mesh))
    assert config.load(config.MeshConfig, file) == mesh


def test_help_shows_every_field_with_its_words_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.from_args(Recipe, ["--help"])
    text = capsys.readouterr().out
    for part in ("Train a model.", "--steps int", "Optimiser steps in all. (default 100)", "grpo|dapo", "(required)"):
        assert part in text
    assert "--sampling.temperature float" in text and "Divides the logits." in text


def test_mistaken_flags_are_explained() -> None:
    assert "option --stpes: unknown key 'stpes': did you mean 'steps'?" in refuse("--stpes", "3")
    assert 'option --steps: steps = "ten": expected `int`, got `str`' in refuse("--model", "m", "--steps", "ten")
    assert "'grop'; did you mean 'grpo'? choose one of grpo, dapo" in refuse("--model", "m", "--loss", "grop")
    assert "'model' is missing" in refuse("--steps", "3")
    assert "option --steps needs a value" in refuse("--steps")
    assert "argument 'steps=3': options start with --; did you mean '--steps'?" in refuse("steps=3")
    assert "sampling.temperature is a value, not a table" in refuse("--sampling.temperature.x", "3")


def test_mistakes_in_a_file_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"

    def refused(text: str) -> str:
        file.write_text(text)
        with pytest.raises(ConfigError) as raised:
            config.load(Recipe, file)
        return str(raised.value)

    assert f"{file}:3: unknown key 'temprature' in [sampling]: did you mean 'temperature'?" in refused(
        'model = "m"\n[sampling]\ntemprature = 1\n'
    )
    assert f'{file}:2: steps = "3": expected `int`' in refused('model = "m"\nsteps = "3"\n')
    assert "not valid TOML" in refused("model = ")
    with pytest.raises(ConfigError, match="no such file"):
        config.load(Recipe, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="write it as key=value"):
        config.load(Recipe, None, ["steps"])


def test_shipped_meshes_are_what_they_say() -> None:
    local, node = config.load_mesh("local"), config.load_mesh("node8")
    assert (local.device, local.trainer.procs, local.rollout.replicas, local.place("rollout", 0).gpus) == (
        "cpu",
        1,
        1,
        (),
    )
    assert node.trainer.procs == 4 and node.place("trainer", 0).gpus == (0, 1, 2, 3)
    assert [node.place("rollout", i).gpus for i in range(4)] == [(4,), (5,), (6,), (7,)]
    assert node.place("reference", 0).gpus == node.place("trainer", 0).gpus
    assert node.place("puller", 0).gpus == () and node.place("puller", 0).environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert node.place("rollout", 0).environment("8,9,10,11,12,13,14,15")["CUDA_VISIBLE_DEVICES"] == "12"
    more = config.load_mesh("node8", ["hosts.count=2", "rollout.max_replicas=6"])
    assert [more.place("rollout", i).gpus for i in (4, 5)] == [(8,), (9,)], "kept for engines that may come"
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='0,1' holds 2"):
        node.place("rollout", 0).environment("0,1")


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("node8", "rollout.replicas=5", "rollout.replicas: rollout4 needs 1 GPU of one host; 8 of 8 are taken"),
        ("node8", "trainer.tensor_parallel=4", "trainer: trainer0 needs 16 GPUs of one host; 0 of 8 are taken"),
        ("node8", "hosts.gpus=0", "hosts.gpus: device is 'cuda', so say how many"),
        ("local", "hosts.gpus=2", "hosts.gpus: 2, but device is 'cpu'"),
        ("local", "trainer.tensor_parallel=0", "trainer.tensor_parallel: 0 is too few; at least 1"),
        ("local", "hosts.kind=slurm", "hosts.kind: 'slurm' is not supported by this version"),
        ("local", "hosts.kind=moon", "hosts.kind: 'moon' is unknown"),
        ("local", "hosts.orphan_grace_s=-1", "hosts.orphan_grace_s: -1 is no time to wait; 0 or more seconds"),
        ("local", "trainer.dtype=fp32", "choose one of float32, bfloat16"),
        ("local", "rollout.replica=2", "did you mean 'rollout.replicas'"),
        ("local", "trainer.threads=1.5", "expected `int`, got `float`"),
        ("local", "rollout.max_replicas=-1", "rollout.max_replicas: -1 is too few; at least 0"),
        ("node8", "rollout.max_replicas=3", "rollout.max_replicas: 3 is below the 4 of rollout.replicas"),
        ("local", "rollout.upscale_delay_s=0", "rollout.upscale_delay_s: 0 is too short or too long"),
        ("local", "teacher.max_replicas=2", "only the engines of [rollout] are scaled"),
        ("local", "faults.retries=-1", "faults.retries: -1 is too few; at least 0"),
        ("local", "faults.most_s=-2", "faults.most_s: -2 is no time; 0 or more seconds"),
        ("local", "critic.tensor_parallel=0", "critic.tensor_parallel: 0 is too few; at least 1"),
        ("local", "reward_model.thread=2", "did you mean 'reward_model.threads'"),
        ("node8", "critic.data_parallel_shard=4", "rollout0 needs 1 GPU of one host; 8 of 8 are taken"),
        ("local", 'hosts.notice="/run/{rack}"', "only {host} may stand in braces"),
        ("node8", "rollout.prefill.replicas=1", "rollout.replicas: rollout3 needs 1 GPU of one host; 8 of 8 are taken"),
        ("node8", "rollout.prefill.replicas=5", "rollout.prefill.replicas: prefill4 needs 1 GPU of one host; 8 of 8 are taken"),
        ("local", "rollout.prefill.replicas=-1", "rollout.prefill.replicas: -1 is too few; at least 0"),
        ("local", "rollout.prefill.threads=0", "rollout.prefill.threads: 0 is too few; at least 1"),
        ("local", "rollout.engine.disaggregation_mode=prefill", "rollout.engine.disaggregation_mode: say rollout.prefill.replicas instead"),
        ("lokal", "", "no mesh named 'lokal': did you mean 'local'?"),
    ],
)
def test_meshes_that_cannot_be_are_refused(name: str, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load_mesh(name, [override] if override else [])
    assert words in str(raised.value)


def test_a_critic_and_a_reward_model_have_places_of_their_own_where_the_mesh_says_so() -> None:
    node = config.load_mesh("node8", ["critic.data_parallel_shard=2", "reward_model.threads=3", "rollout.replicas=1"])
    assert node.place("critic", 0).gpus == (4, 5) and node.degrees("critic").procs == 2
    assert node.place("reward_model", 0).gpus == (6,) and node.place("reward_model", 0).threads == 3
    plain = config.load_mesh("node8")
    for role in ("critic", "reward_model", "reference"):
        assert plain.place(role, 0) == plain.place("trainer", 0) and plain.degrees(role) == plain.trainer
    with pytest.raises(ConfigError, match="there is one critic, so critic1 has no place"):
        node.place("critic", 1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.replicas=0", "rollout.replicas: 0, so nobody decodes what 2 engines prefill: at least 1, or rollout.prefill.replicas = 0"),
        ("rollout.tensor_parallel=2", "rollout.tensor_parallel: 2, but engines that prefill or decode only have one rank: set 1, or"),
        ("rollout.kv_tier.memory_ratio=2", "rollout.kv_tier.memory_ratio: no tier lies below engines that prefill or decode only: leave"),
        ("hosts.orphan_grace_s=9", "hosts.orphan_grace_s: a new controller does not take over engines that prefill or decode only: set 0, or"),
        ("teacher.prefill.replicas=1", "teacher.prefill.replicas: a teacher decodes nothing: give it more teacher.replicas instead"),
    ],
)
def test_what_does_not_go_with_engines_that_only_prefill_is_refused_with_the_mend(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load_mesh("local", ["rollout.prefill.replicas=2", override])
    assert words in str(raised.value)


def test_engines_that_prefill_have_places_and_teachers_stay_whole() -> None:
    node = config.load_mesh("node8", ["rollout.prefill.replicas=2", "rollout.replicas=2", "rollout.prefill.threads=3"])
    assert [node.place("prefill", i).gpus for i in (0, 1)] == [(4,), (5,)] and node.place("rollout", 1).gpus == (7,)
    assert node.place("prefill", 0).threads == 3
    assert config.load_mesh("local", ["rollout.prefill.replicas=1"]).place("prefill", 0).cpu


def test_engine_options_pass_through() -> None:
    mesh = config.load_mesh("local", ["rollout.engine.max_total_tokens=4096", "rollout.engine.dtype=float32"])
    own = config.load_mesh("local").rollout.engine
    assert mesh.rollout.engine == own | {"max_total_tokens": 4096, "dtype": "float32"}
