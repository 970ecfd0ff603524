"""The trainer on the real TorchTitan: equal however it is cut, equal to transformers, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
SCENARIOS = Path(__file__).with_name("trainer_scenarios.py")
SIZES = dict(
    vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5,
)  # fmt: skip


def make_model(folder: Path, family: str) -> Path:
    """A model of random weights in transformers' own layout, biased and scaled so that no term is zero or one."""
    import torch
    import transformers

    torch.manual_seed(0)
    stretched = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = {
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
        "qwen3 tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
        "llama tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "llama 3.1": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=stretched),
        # SmolLM2-135M's cut of a layer: 9 heads, 3 of them for keys and values
        "smollm2": lambda: transformers.LlamaConfig(
            vocab_size=1026, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=True,
        ),  # fmt: skip
        "qwen2": lambda: transformers.Qwen2Config(**SIZES),
        "moe": lambda: transformers.Qwen3MoeConfig(
            **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
        ),
    }[family]()
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(scenario: str, model: Path, folder: Path, ranks: int) -> dict:
    """The scenario's findings, from `ranks` processes; none is left afterwards."""
    folder.mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
    }  # fmt: skip
    out = folder / "out.json"
    processes, logs = [], [folder / f"rank{r}.log" for r in range(ranks)]
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(SCENARIOS), scenario, str(model), str(out)]
            with log.open("w") as file:
                own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
        codes = [p.wait(timeout=300) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_model(folder / family.replace(" ", "-"), family)
        return made[family]

    return get


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory) -> dict:
    return run("alone", models("qwen3"), tmp_path_factory.mktemp("alone") / "run", 1)


def assert_same_training(found: dict, one: dict) -> None:
    for step in ("first", "second"):
        assert found[step]["loss"] == pytest.approx(one[step]["loss"], abs=1e-5)
        assert found[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-4)
        for metric in ("entropy", "ratio"):
            assert found[step][metric] == pytest.approx(one[step][metric], rel=1e-4)
    assert found["logprobs"] == pytest.approx(one["logprobs"], rel=1e-6)
    assert found["names"] == found["expected"]
    assert found["published_once"] and found["values_right"]


def test_two_ranks_train_as_one_however_the_model_is_cut(models, alone, tmp_path):
    found = run("parallel", models("qwen3"), tmp_path / "run", 2)
    for degrees in ("fsdp2", "tp2", "ddp2", "cp2"):
        assert_same_training(found[degrees], alone["one"])
    resumed = found["tp2_resumed"]
    assert resumed["parameters_equal"] and resumed["metrics_equal"] and resumed["after_equal"]


@pytest.mark.slow
def test_four_ranks_train_as_one(models, alone, tmp_path):
    found = run("four", models("qwen3"), tmp_path / "run", 4)
    for degrees in ("hsdp", "fsdp2_tp2"):
        assert_same_training(found[degrees], alone["one"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["moe", "llama tied"])
def test_other_families_train_alike_on_two_ranks(family, models, tmp_path):
    one = run("one", models(family), tmp_path / "one", 1)
    found = run("parallel", models(family), tmp_path / "two", 2)
    for degrees in ("fsdp2", "tp2", "ddp2", "cp2"):
        assert_same_training(found[degrees], one["one"])


def test_the_split_into_micro_batches_and_recomputation_change_nothing(alone):
    for other in ("one_micro_batch", "recomputed"):
        assert alone[other]["first"]["loss"] == pytest.approx(alone["one"]["first"]["loss"], abs=1e-6)
        assert alone[other]["first"]["grad_norm"] == pytest.approx(alone["one"]["first"]["grad_norm"], rel=1e-5)
    assert alone["bfloat16"]["first"]["loss"] == pytest.approx(alone["one"]["first"]["loss"], abs=2e-2)


def test_resume_is_bitwise_and_keeps_the_controllers_state(alone):
    resumed = alone["resumed"]
    assert resumed["state"] == {"step": 2, "again": True}
    assert resumed["version"] == "1.2" and resumed["broken"] == [4, 3], "the newest good one, beside two that are broken"
    assert resumed["parameters_equal"] and resumed["metrics_equal"] and resumed["after_equal"]
    assert resumed["lr"] == pytest.approx(2e-2 * 3 / 4)


def test_a_step_that_cannot_be_taken_is_refused_and_changes_nothing(alone):
    refused = alone["refused"]
    assert "loss is nan" in refused["nan"]
    assert "micro-batch 2" in refused["inf in one micro-batch"]
    assert "gradient norm is nan" in refused["gradient"]
    assert "ZeroDivisionError" in refused["raises"]
    assert "does not depend on the policy" in refused["constant"]
    assert "a loss returns a tensor" in refused["shape"]
    assert alone["unchanged"]
    assert alone["nothing trained"]["applied"] == 0 and alone["still unchanged"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3 tied", "llama tied", "llama 3.1", "qwen2", "moe"])
def test_logits_equal_those_of_transformers_before_and_after_export(family, models, tmp_path):
    import torch
    import transformers
    from trainer_scenarios import packed_batch

    from milkweed.training.config import TrainerConfig
    from milkweed.training.rank import TrainerRank

    batch = packed_batch(rows=2, seq=96, temperature=1.0)
    rank = TrainerRank(str(models(family)), TrainerConfig(seq_len=96, lr=1e-2))
    for folder in (models(family), tmp_path / "exported"):
        if not folder.exists():
            rank.update(batch, lambda batch, policy: -policy.logprobs)
            rank.export(str(folder))
            assert (folder / "tokenizer.json").exists()
        with torch.no_grad():
            ours = rank.forward(batch).logits()
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for segment in range(int(batch.segments.max()) + 1):
                at = (batch.segments == segment).nonzero(as_tuple=True)
                expected = theirs(batch.tokens[at][None]).logits[0]
                # ours are token-aligned: what predicts a token stands at that token
                assert (ours[at][1:] - expected[:-1]).abs().max() < 2e-5 * max(1.0, expected.abs().max())
    assert math.isfinite(float(ours.sum()))


@pytest.fixture(scope="module")
def critic(models, tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("critic") / "run"
    return run("critic", models("qwen3 tied"), folder, 1)["one"], folder / "one-critic" / "exported"


def test_a_critic_learns_from_a_policys_folder_and_is_kept_whole(critic):
    found, _ = critic
    assert found["fresh"] == 0 and found["losses"][2] < 0.8 * found["losses"][0]
    assert found["loaded_equal"] and found["exported_equal"] and found["published_once"] and found["names_right"]


def test_a_critic_on_two_ranks_is_the_one_on_one_rank(models, critic, tmp_path):
    one, _ = critic
    for degrees, found in run("critic", models("qwen3 tied"), tmp_path / "run", 2).items():
        if degrees == "_folder":
            continue
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-3), degrees
        assert found["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-3), degrees
        assert found["values"] == pytest.approx(one["values"], abs=1e-3), degrees
        assert all(found[k] for k in ("loaded_equal", "exported_equal", "published_once", "names_right")), degrees


def test_a_critics_folder_is_one_of_transformers_sequence_classifiers(critic):
    import torch
    import transformers
    from trainer_scenarios import value_batch

    found, folder = critic
    batch = value_batch()
    values = torch.tensor(found["values"]).view(batch.tokens.shape)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        for segment in range(int(batch.segments.max()) + 1):
            at = (batch.segments == segment).nonzero(as_tuple=True)
            hidden = model.model(batch.tokens[at][None]).last_hidden_state
            assert (model.score(hidden)[0, :, 0] - values[at]).abs().max() < 2e-5


def test_a_head_is_not_taken_for_the_other(models, critic):
    from trainer_scenarios import packed_batch

    from milkweed.errors import ConfigError, DataError, StepRefused
    from milkweed.training.config import TrainerConfig
    from milkweed.training.rank import TrainerRank

    config = TrainerConfig(seq_len=64)
    with pytest.raises(DataError, match="no policy"):
        TrainerRank(str(critic[1]), config)
    with pytest.raises(ConfigError, match="'policy' or 'value'"):
        TrainerRank(str(critic[1]), config, head="scores")
    policy, value = TrainerRank(str(models("qwen3")), config), TrainerRank(str(critic[1]), config, head="value")
    with pytest.raises(ConfigError, match="no values"):
        policy.values(packed_batch())
    with pytest.raises(ConfigError, match="no log-probs"):
        value.logprobs(packed_batch())
    with pytest.raises(StepRefused, match="it is no policy"):
        value.update(packed_batch(), lambda batch, policy: -policy.logprobs)
