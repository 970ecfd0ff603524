"""Each recipe learns on the real stack: its measure, threshold and seed stand here, and with learning rate 0 the same
check fails. What does not change needs no time, so runs of rate 0 take two steps.

The chain: SFT (`warm`), then a reward model from preferences, then PPO against it, then DPO of PPO's policy on the same
pairs. The seed is 0 throughout.
"""

from __future__ import annotations

import asyncio
import shutil
import typing
from pathlib import Path

import pytest
from conftest import inside

import milkweed as mw

pytestmark = pytest.mark.stack
slow = pytest.mark.slow  # what starts from the warm model
REWARD_LR, REWARD_STEPS = 1e-3, 200
PPO_VERIFIED, PPO_JUDGED = 32, 36
DPO_STEPS = 20
DISTILL_STEPS = 40
GRPO_STEPS = 40


def numbers(folder: Path, name: str) -> list[float]:
    """Every value that a run noted under `name`, oldest first."""
    return [row[name] for row in mw.read_metrics(folder) if name in row]


def config(module, folder: Path, lr: float, steps: int, **changes):
    """A recipe's configuration with this peak rate; without one, of two steps."""
    import msgspec

    steps = steps if lr else 2
    trainer = msgspec.structs.replace(module.Config().trainer, lr=lr)
    common = {"run_dir": str(folder), "steps": steps, "eval_every": steps, "checkpoint_every": 1000}
    return module.Config(**common | {"trainer": trainer} | changes)


def run(work, folder: Path, seconds: float = 420):
    with inside(folder):
        return asyncio.run(asyncio.wait_for(work, seconds))


# ---- SFT: held-out loss halves


@pytest.mark.parametrize("lr", [1e-3, 0.0])
def test_sft_halves_the_held_out_loss(lr, recipes, tmp_path):
    import sft

    with inside(tmp_path):
        model = sft.fresh_model().absolute()
    cfg = config(sft, tmp_path / "run", lr, 24, eval_every=1, batch=64)
    run(sft.train(cfg, model), tmp_path)
    losses = numbers(tmp_path / "run", "held_out_loss")
    assert (losses[-1] <= 0.5 * losses[0]) == (lr > 0), losses


# ---- reward model: held-out preference accuracy at least 0.85


def train_reward_model(warm: Path, folder: Path, lr: float) -> tuple[Path, float]:
    import reward_model

    cfg = config(reward_model, folder / "run", lr, REWARD_STEPS)
    out = run(reward_model.train(cfg, warm, folder / "model"), folder)
    return out, numbers(folder / "run", "held_out_accuracy")[-1]


@pytest.fixture(scope="module")
def judge(warm, tmp_path_factory) -> tuple[Path, float]:
    return train_reward_model(warm, tmp_path_factory.mktemp("judge"), REWARD_LR)


@slow
def test_the_reward_model_tells_right_sums_from_wrong_ones(judge):
    assert judge[1] >= 0.85


@slow
def test_without_a_learning_rate_the_reward_model_does_not(warm, tmp_path):
    assert train_reward_model(warm, tmp_path, 0.0)[1] < 0.85


# ---- PPO: held-out reward up by 0.3, there always that of the verified sum


def train_ppo(model: Path, folder: Path, lr: float, steps: int, **changes) -> tuple[str, float]:
    import ppo

    cfg = config(ppo, folder / "run", lr, steps, **changes)
    out = run(ppo.train(cfg, str(model)), folder)
    rewards = numbers(folder / "run", "held_out/reward")
    return out, rewards[-1] - rewards[0]


@pytest.fixture(scope="module")
def preferred(warm, judge, tmp_path_factory) -> tuple[str, float]:
    folder = tmp_path_factory.mktemp("preferred")
    return train_ppo(warm, folder, 4e-4, PPO_JUDGED, reward_model=str(judge[0]), kl=0.1)


@slow
def test_ppo_against_the_reward_model_gets_sums_right(preferred):
    assert preferred[1] >= 0.3


@slow
def test_ppo_on_a_verified_reward_gets_sums_right(warm, tmp_path):
    assert train_ppo(warm, tmp_path, 4e-4, PPO_VERIFIED)[1] >= 0.3


@slow
def test_without_a_learning_rate_ppo_does_not(warm, tmp_path):
    assert train_ppo(warm, tmp_path, 0.0, 2)[1] < 0.3


# ---- DPO: held-out preference accuracy at least 0.85


def train_dpo(model: str | Path, folder: Path, lr: float) -> float:
    import dpo

    run(dpo.train(config(dpo, folder / "run", lr, DPO_STEPS), model), folder)
    return numbers(folder / "run", "held_out_accuracy")[-1]


@slow
def test_dpo_after_ppo_learns_the_same_preferences(preferred, tmp_path):
    assert train_dpo(preferred[0], tmp_path, 2e-4) >= 0.85


@slow
def test_without_a_learning_rate_dpo_does_not(warm, tmp_path):
    assert train_dpo(warm, tmp_path, 0.0) < 0.85


# ---- distillation: reverse KL to the teacher down by 80%


@pytest.mark.parametrize("lr", [4e-4, 0.0])
@slow
def test_distillation_comes_near_its_teacher(lr, warm, tmp_path):
    import distill

    cfg = config(distill, tmp_path / "run", lr, DISTILL_STEPS, model=str(warm))
    run(distill.main(cfg), tmp_path)
    first, last = (numbers(tmp_path / "run", "held_out_reverse_kl")[i] for i in (0, -1))
    assert (last <= 0.2 * first) == (lr > 0), (first, last)


def surer(model: Path, folder: Path) -> Path:
    """`model` with its logits doubled: the last norm's scale is."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("lr", [4e-4, 0.0])
@slow
def test_distillation_from_a_teacher_on_engines_comes_near_it_too(lr, warm, tmp_path):
    import distill

    teacher = {"teacher": str(surer(warm, tmp_path / "teacher")), "engine": True, "teacher_temperature": 1.0, "top_k": 8}
    cfg = config(distill, tmp_path / "run", lr, DISTILL_STEPS, model=str(warm), **teacher)
    run(distill.main(cfg), tmp_path)
    first, last = (numbers(tmp_path / "run", "held_out_reverse_kl")[i] for i in (0, -1))
    assert (last <= 0.2 * first) == (lr > 0), (first, last)


# ---- GRPO and its variants: held-out reward up by 0.3


def train_grpo(model: Path, folder: Path, lr: float, algorithm: str = "grpo") -> float:
    import grpo

    changes = {"model": str(model), "algorithm": algorithm, "prompts": 32, "samples": 4}
    run(grpo.main(config(grpo, folder / "run", lr, GRPO_STEPS, **changes)), folder)
    rewards = numbers(folder / "run", "held_out/reward")
    return rewards[-1] - rewards[0]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "reinforce", "maxrl"])
@slow
def test_grpo_and_each_variant_gets_sums_right(algorithm, warm, tmp_path):
    assert train_grpo(warm, tmp_path, 4e-4, algorithm) >= 0.3


def test_every_variant_that_the_option_names_is_among_those(recipes):
    import grpo

    mark = next(m for m in test_grpo_and_each_variant_gets_sums_right.pytestmark if m.name == "parametrize")
    assert list(typing.get_args(grpo.Config.__annotations__["algorithm"])) == mark.args[1]


@slow
def test_without_a_learning_rate_grpo_does_not(warm, tmp_path):
    assert train_grpo(warm, tmp_path, 0.0) < 0.3
