"""What `test_trainer.py` runs in the trainer's processes: `python trainer_scenarios.py SCENARIO MODEL OUT`, under the
environment of torch.distributed. Rank 0 writes what it saw as JSON to OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from milkweed.algorithms import value_loss
from milkweed.errors import StepRefused
from milkweed.training import shards
from milkweed.training.batching import merge_rows
from milkweed.training.config import TrainerConfig
from milkweed.training.rank import TrainerRank
from milkweed.types import Batch


def packed_batch(rows: int = 5, seq: int = 64, vocab: int = 1024, seed: int = 0, temperature: float = 0.8) -> Batch:
    """Rows of several short sequences, with some padding at their ends."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(rows, seq, dtype=torch.long)
    positions, segments = tokens.clone(), tokens.clone() - 1
    mask = torch.zeros(rows, seq, dtype=torch.bool)
    number = 0
    for row in range(rows):
        at = 0
        while at < seq - 8:
            n = min(int(torch.randint(5, 30, (1,), generator=g)), seq - 4 - at)
            tokens[row, at : at + n] = torch.randint(3, vocab, (n,), generator=g)
            positions[row, at : at + n] = torch.arange(n)
            segments[row, at : at + n] = number
            mask[row, at + n // 3 + 1 : at + n] = True
            number, at = number + 1, at + n
    advantages = torch.randn(rows, seq, generator=g) * mask
    behaviour = (-6.9 + 0.1 * torch.randn(rows, seq, generator=g)) * mask
    weights = mask.float() / mask.sum()
    return Batch(
        tokens, positions, segments, mask, weights, behaviour, advantages, totals={"tokens": float(mask.sum())}, temperature=temperature
    )


def policy_gradient(batch, policy):
    """Clipped policy gradient with a small entropy bonus, so that both kinds of output carry gradient."""
    ratio = torch.exp(policy.logprobs - batch.logprobs)
    gain = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    entropy = policy.entropy()
    return -gain - 0.01 * entropy, {"entropy": entropy, "ratio": ratio}


def collect(pieces: list[shards.Piece]) -> dict[str, list]:
    """All ranks' pieces put together: by name, how often each element was published, and the values."""
    mine = [(p.name, p.shape, p.offsets, p.tensor().clone()) for p in pieces]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    out: dict[str, list] = {}
    for name, shape, offsets, tensor in (piece for rank in every for piece in rank):
        count, value = out.setdefault(name, [torch.zeros(shape, dtype=torch.int), torch.zeros(shape)])
        at = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape))
        count[at] += 1
        value[at] = tensor
    return out


def one_step(model: str, **degrees) -> dict:
    """Two steps from the folder, with the whole of what came out and whether the shards make up the model."""
    rank = TrainerRank(model, TrainerConfig(lr=1e-2, seq_len=64, micro_rows=2, **degrees))
    batch = packed_batch()
    scored = rank.logprobs(batch)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, scored)
    logprobs = torch.zeros(batch.tokens.shape)
    for part in parts:
        if part is not None:
            logprobs[part[0]] = part[1]
    first, second = rank.update(batch, policy_gradient), rank.update(batch, policy_gradient)
    together = collect(rank.hf_shards())
    whole = dict(shards.full_tensors(rank.parameters))
    return {
        "first": first,
        "second": second,
        "logprobs": logprobs.double().sum().item(),
        "names": sorted(together),
        "expected": sorted(rank.architecture.weights()),
        "published_once": all(bool((c == 1).all()) for c, _ in together.values()),
        "values_right": all(torch.equal(whole[n].cpu(), v) for n, (_, v) in together.items()),
    }


def value_batch() -> Batch:
    """Returns that say which token was read, so that a head which looks one token off cannot learn them."""
    batch = packed_batch()
    target = (batch.tokens % 2).float()
    batch.extra |= {"returns": target, "values": torch.zeros_like(target)}
    return batch


def value_steps(model: str, folder: str, **degrees) -> dict:
    """A critic made from a policy's folder: three steps, a checkpoint between, an export that is a critic's folder."""
    config = TrainerConfig(lr=1e-2, seq_len=64, micro_rows=2, **degrees)
    run = f"{folder}/{'-'.join(degrees) or 'one'}-critic"
    rank, batch, loss = TrainerRank(model, config, run_dir=run, head="value"), value_batch(), value_loss(clip=None)
    fresh = values_of(rank, batch)
    steps = [rank.update(batch, loss), rank.update(batch, loss)]
    rank.save("{}")
    saved, values = rank.checksum(), values_of(rank, batch)
    steps.append(rank.update(batch, loss))
    rank.save("{}")
    rank.load(step=2)
    rank.export(f"{run}/exported")
    dist.barrier()  # the folder is written by one rank
    again = TrainerRank(f"{run}/exported", config, optimise=False, head="value")
    together = collect(rank.hf_shards())
    return {
        "fresh": fresh.abs().max().item(),
        "losses": [s["loss"] for s in steps],
        "grad_norms": [s["grad_norm"] for s in steps],
        "values": values.flatten().tolist(),
        "loaded_equal": rank.checksum() == saved and str(rank.version) == "1.2",
        "exported_equal": again.checksum() == saved,
        "published_once": all(bool((c == 1).all()) for c, _ in together.values()),
        "names_right": sorted(together) == sorted(rank.architecture.weights()),
    }


def values_of(rank: TrainerRank, batch: Batch) -> torch.Tensor:
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rank.values(batch))
    return merge_rows(parts, *batch.tokens.shape)


def critic(model: str, out: dict) -> None:
    every = [{"data_parallel_shard": 2}, {"tensor_parallel": 2}, {"data_parallel_replicate": 2}, {"context_parallel": 2}]
    for degrees in every if os.environ["WORLD_SIZE"] == "2" else [{}]:
        out[next(iter(degrees), "one")] = value_steps(model, out["_folder"], **degrees)


def parallel(model: str, out: dict) -> None:
    for name, degrees in {
        "fsdp2": {"data_parallel_shard": 2},
        "tp2": {"tensor_parallel": 2},
        "ddp2": {"data_parallel_replicate": 2},
        "cp2": {"context_parallel": 2},
    }.items():
        out[name] = one_step(model, **degrees)
    out["tp2_resumed"] = resume(model, out["_folder"], tensor_parallel=2)


def four(model: str, out: dict) -> None:
    for name, degrees in {
        "hsdp": {"data_parallel_shard": 2, "data_parallel_replicate": 2},
        "fsdp2_tp2": {"data_parallel_shard": 2, "tensor_parallel": 2},
    }.items():
        out[name] = one_step(model, **degrees)


def resume(model: str, folder: str, **degrees) -> dict:
    """Save after two steps, step on; a second trainer loads and steps: the same, to the bit?"""
    config = TrainerConfig(lr=1e-2, warmup_steps=4, seq_len=64, keep_checkpoints=0, **degrees)
    run = f"{folder}/{'-'.join(degrees) or 'one'}"
    batch, later = packed_batch(), packed_batch(seed=1)
    rank = TrainerRank(model, config, run_dir=run)
    rank.update(batch, policy_gradient)
    rank.set_lr(2e-2)
    rank.update(batch, policy_gradient)
    rank.save(json.dumps({"step": 2}))
    rank.save(json.dumps({"step": 2, "again": True}))
    at_save = rank.checksum()
    went_on = rank.update(later, policy_gradient)
    after = rank.checksum()  # the checkpoint was being written meanwhile
    rank.save("{}")
    rank.update(later, policy_gradient)
    rank.save("{}")
    rank.saved(wait=True)
    if dist.get_rank() == 0:  # the newest two look whole and are rotten: one is cut short, in the other one bit is another
        cut, flipped = (max(Path(run, "checkpoints", s).glob("*.distcp"), key=lambda p: p.stat().st_size) for s in ("step-3", "step-4"))
        os.truncate(cut, cut.stat().st_size // 2)
        with flipped.open("r+b") as part:
            part.seek(flipped.stat().st_size // 2)
            byte = part.read(1)[0]
            part.seek(-1, os.SEEK_CUR)
            part.write(bytes([byte ^ 1]))
    dist.barrier()
    other = TrainerRank(model, config, run_dir=run)
    state = other.load()
    loaded = other.checksum()
    version = str(other.version)
    again = other.update(later, policy_gradient)
    for x in (went_on, again):
        x.pop("seconds")
    return {
        "state": json.loads(state or "null"),
        "broken": list(other.checkpoints.broken),
        "version": version,
        "parameters_equal": loaded == at_save,
        "metrics_equal": went_on == again,
        "after_equal": other.checksum() == after,
        "lr": again["lr"],
    }


def one(model: str, out: dict) -> None:
    out["one"] = one_step(model)


def alone(model: str, out: dict) -> None:
    one(model, out)
    rank = TrainerRank(model, TrainerConfig(lr=1e-2, seq_len=64, micro_rows=5))
    out["one_micro_batch"] = {"first": rank.update(packed_batch(), policy_gradient)}
    rank = TrainerRank(model, TrainerConfig(lr=1e-2, seq_len=64, activation_checkpointing=True))
    out["recomputed"] = {"first": rank.update(packed_batch(), policy_gradient)}
    rank = TrainerRank(model, TrainerConfig(lr=1e-2, seq_len=64, dtype="bfloat16"))
    out["bfloat16"] = {"first": rank.update(packed_batch(), policy_gradient)}
    out["resumed"] = resume(model, out["_folder"])

    rank = TrainerRank(model, TrainerConfig(lr=1e-2, seq_len=64, micro_rows=2))
    rank.update(packed_batch(), policy_gradient)
    before, moments = rank.checksum(), [s["exp_avg"].clone() for o in rank.optimizers for s in o.state.values()]
    refused = {}

    def endless(batch, policy):
        # the last micro-batch only: what the others have added to the gradient must go too
        return policy.logprobs * (float("inf") if batch.rows == 1 else 1.0)

    def steep(batch, policy):
        # finite everywhere, but the slope of a square root at 0 is not
        return torch.sqrt((policy.logprobs - policy.logprobs.detach()) ** 2)

    for name, loss in {
        "nan": lambda batch, policy: policy.logprobs * float("nan"),
        "inf in one micro-batch": endless,
        "gradient": steep,
        "raises": lambda batch, policy: 1 / 0,
        "constant": lambda batch, policy: batch.weights * 0,
        "shape": lambda batch, policy: policy.logprobs[0],
    }.items():
        try:
            rank.update(packed_batch(), loss)
            refused[name] = "applied"
        except StepRefused as error:
            refused[name] = str(error)
    now = [s["exp_avg"] for o in rank.optimizers for s in o.state.values()]
    out["refused"] = refused
    out["unchanged"] = rank.checksum() == before and all(map(torch.equal, moments, now)) and str(rank.version) == "0.1"
    nothing = packed_batch()
    nothing.mask[:] = False
    out["nothing trained"] = rank.update(nothing, policy_gradient)
    out["still unchanged"] = rank.checksum() == before
    folder = Path(out["_folder"]) / "exported"
    rank.export(str(folder))
    out["exported_equal"] = TrainerRank(str(folder), TrainerConfig(seq_len=64), optimise=False).checksum() == before


if __name__ == "__main__":
    scenario, model, target = sys.argv[1:]
    torch.set_num_threads(1)
    result: dict = {"_folder": str(Path(target).parent)}
    {"one": one, "alone": alone, "parallel": parallel, "four": four, "critic": critic}[scenario](model, result)
    if dist.get_rank() == 0:
        Path(target).write_text(json.dumps(result))
    dist.destroy_process_group()
