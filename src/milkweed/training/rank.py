"""One rank of a trainer, without Monarch: forward and backward passes, the optimiser step, checkpoints, weights out.

Every method is collective: all ranks call it with the same arguments. A failure that one rank meets is agreed on
before the next collective, so that all raise and none waits for the others.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from milkweed.errors import ConfigError, DataError, StepRefused
from milkweed.training import batching, shards, titan
from milkweed.training.checkpoints import Checkpoints
from milkweed.training.config import TrainerConfig
from milkweed.training.export import Partial, copy_side_files, write_weights
from milkweed.training.model import Head, check_weights, read_architecture
from milkweed.training.policy import Policy, Values
from milkweed.training.saving import Saving
from milkweed.transfer.manifest import RankManifest
from milkweed.types import Batch, Loss, PolicyVersion

Rows = tuple[list[int], torch.Tensor]
EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TrainerRank(Saving):
    """A policy, or with `head="value"` a critic or reward model, loaded from the Hugging Face folder `model` and, unless
    `optimise` is off (a reference), its optimiser.

    `run_dir` is where checkpoints go; without it `save` and `load` are refused. `copies` is where, in memory, `copy` puts the
    same. Raises ConfigError or DataError, naming
    the key or the file, where the folder or the degrees will not do.
    """

    def __init__(
        self, model: str, config: TrainerConfig, *, run_dir: str | None = None, optimise: bool = True, head: Head = "policy",
        copies: str | None = None,
    ) -> None:  # fmt: skip
        started = time.perf_counter()
        torch.set_num_threads(config.threads)
        self.folder, self.config = str(model), config
        self.architecture = read_architecture(model, head)
        check_weights(model, self.architecture)
        self.parallel = titan.build(self.architecture, config, run_dir or "")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # taken while the parameters are sharded: after a forward pass the modules may show gathered ones instead
        self.parameters = titan.parameters(self.parallel, self.architecture)
        shards.load(self.parameters, self.folder)
        self.version = PolicyVersion()
        self.peak_lr = config.lr
        self.busy_s = 0.0
        self.optimizers: Any = None
        self.checkpoints = self.copies = None
        if optimise:
            self.optimizers = titan.build_optimizer(self.parallel, config)
            if run_dir:
                self.checkpoints = Checkpoints(self.parallel, self.optimizers, Path(run_dir), config.keep_checkpoints)
            if copies and config.copy_every:
                self.copies = Checkpoints(self.parallel, self.optimizers, Path(copies), 2)
        else:
            for p in self.parameters.values():
                p.requires_grad_(False)
        self.trained: Rows | None = None  # log-probs that the last update began with, as `logprobs` answers
        self._pieces: list[shards.Piece] | None = None
        self._sender: Any = None
        self._cp_group, self._tp_group = self.parallel.group("cp"), self.parallel.group("tp")
        self._batch_group = self.parallel.group("batch")
        self._world_group = dist.group.WORLD if self.world > 1 else None
        self._speaks = self.parallel.cp_rank == 0 and self.parallel.tp_rank == 0
        self.start_s = time.perf_counter() - started

    # ---- passes ----

    def _micro_batches(self, batch: Batch):
        return batching.micro_batches(
            batch,
            rank=self.parallel.batch_rank,
            ranks=self.parallel.batch_size,
            micro_rows=self.config.micro_rows,
            multiple=self._multiple(),
            # DTensor cuts the router's gradient over rows, and only evenly
            row_multiple=self.config.tensor_parallel if self.architecture.experts is not None else 1,
        )

    def _multiple(self) -> int:
        # on a GPU every new length recompiles the attention kernel, whose blocks are 128 wide
        return self.config.row_multiple * (128 if torch.cuda.is_available() else 1)

    def forward(self, micro: Batch) -> Policy | Values:
        """One pass over whole rows; under context parallelism this rank computes its share of each."""
        p = self.parallel
        length = micro.tokens.shape[1] // p.cp_size
        cut = slice(p.cp_rank * length, (p.cp_rank + 1) * length)
        with p.context():
            mask, inputs, positions = titan.attention_inputs(p, micro, cut)
            logits = p.model(inputs, positions=positions, attention_masks=mask)
        if self.architecture.head == "value":
            return Values(logits, micro, cp_group=self._cp_group)
        return Policy(logits, micro, cp_group=self._cp_group, tp_group=self._tp_group, cp_slice=cut)

    def _to_device(self, micro: Batch) -> Batch:
        device = titan.device()
        return micro if device.type == "cpu" else batching.map_tensors(micro, lambda _, x: x.to(device))

    def _agree(self, error: str | None) -> str | None:
        """The first rank's error, on every rank, or None."""
        if self._world_group is None:
            return error
        flag = torch.tensor([0 if error is None else 1], device=titan.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._world_group)
        if not int(flag):
            return None
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, error, group=self._world_group)
        return next((f"rank {i}: {e}" for i, e in enumerate(said) if e is not None), None)

    def logprobs(self, batch: Batch) -> Rows | None:
        """Log-probs `[own rows, seq]` with the indices of those rows; None from ranks that only help another."""
        return self._score(batch, "policy", lambda out: out.logprobs)

    def values(self, batch: Batch) -> Rows | None:
        """What the value head says at each token, as `logprobs` answers. Raises ConfigError for a policy."""
        return self._score(batch, "value", lambda out: out.values)

    def top_logprobs(self, batch: Batch, k: int) -> Rows | None:
        """Ids and log-probs of the k likeliest words for each token, as `logprobs` answers: `[own rows, seq, 2, k]`, ids
        first, float64."""
        if not 1 <= k <= self.architecture.vocab:
            raise ConfigError(f"top_logprobs: k must lie in 1 to {self.architecture.vocab} (the vocabulary), not {k}")
        return self._score(batch, "policy", lambda out: torch.stack([x.double() for x in out.top(k)], dim=2))

    def _score(self, batch: Batch, head: Head, read: Callable[[Any], torch.Tensor]) -> Rows | None:
        """What `read` takes from the pass over each micro-batch, `[rows, seq, ...]`, put together for this rank's rows."""
        if self.architecture.head != head:
            have = {"policy": "a policy, which has log-probs and no values", "value": "a value head, which has no log-probs"}
            raise ConfigError(f"this model has {have[self.architecture.head]}; which of both is said when it is started (head=)")
        started = time.perf_counter()
        batching.check(batch, seq_len=self.config.seq_len, vocab=self.architecture.vocab)
        index: list[int] = []
        parts: list[torch.Tensor] = []
        with torch.no_grad():
            for rows, micro in self._micro_batches(batch):
                parts.append(batching.in_batch(read(self.forward(self._to_device(micro))), rows, batch))
                index += rows
        titan.reshard(self.parallel.model)
        self.busy_s += time.perf_counter() - started
        return (index, torch.cat(parts)) if self._speaks else None

    def update(self, batch: Batch, loss: Loss, *, clip_norm: float | None = None) -> dict[str, float]:
        """One optimiser step over the whole batch, or none at all.

        Returns loss, grad_norm, lr, tokens (trained), seen (all but padding), applied (0 where nothing is trained: then
        nothing changes), seconds, and the loss's own metrics. Raises StepRefused, with everything as it was, where the
        loss or the gradient is not finite or the loss function raises.
        """
        if self.optimizers is None:
            raise ConfigError("this is a reference policy: it has no optimiser, so it cannot be updated")
        started = time.perf_counter()
        batching.check(batch, seq_len=self.config.seq_len, vocab=self.architecture.vocab)
        result = {"loss": 0.0, "grad_norm": 0.0, "lr": self.lr, "tokens": float(batch.mask.sum())}
        result |= {"seen": float((batch.segments >= 0).sum()), "applied": 0.0}
        self.trained = None
        if result["tokens"] > 0:
            try:
                result |= self._step(batch, loss, self.config.clip_norm if clip_norm is None else clip_norm)
            finally:
                self.optimizers.zero_grad(set_to_none=True)
                titan.reshard(self.parallel.model)
        result["seconds"] = time.perf_counter() - started
        self.busy_s += result["seconds"]
        return result

    def _step(self, batch: Batch, loss: Loss, clip_norm: float) -> dict[str, float]:
        total, sums, where = 0.0, {}, None
        began: list[Rows] = []
        for number, (rows, micro) in enumerate(self._micro_batches(batch)):
            micro = self._to_device(micro)
            policy = self.forward(micro)
            error, share = None, None
            try:
                share = evaluate(loss, micro, policy, sums)
            except Exception as raised:  # noqa: BLE001  (whatever the user's function raises is reported as such)
                error = f"the loss function raised {type(raised).__name__}: {raised}"
            if (error := self._agree(error)) is not None:
                raise StepRefused(f"step {self.version.step + 1} was not applied: {error}")
            assert share is not None
            value = float(share.detach())
            if where is None and not math.isfinite(value):
                where = f"micro-batch {number} of rank {self.rank}"
            total += value
            if isinstance(policy, Policy):
                began.append((rows, batching.in_batch(policy.logprobs.detach(), rows, batch)))
            if share.requires_grad:
                share.backward()
            else:
                raise StepRefused(
                    f"step {self.version.step + 1} was not applied: the loss does not depend on the policy "
                    "(no gradient flows from it); use policy.logprobs, entropy() or logits()"
                )
        total, metrics, where = self._combine(total, sums, where)
        norm = titan.clip_grad_norm(list(self.parameters.values()), clip_norm)
        if not math.isfinite(total):
            raise StepRefused(f"step {self.version.step + 1} was not applied: the loss is {total} (first in {where})")
        if not math.isfinite(norm):
            raise StepRefused(
                f"step {self.version.step + 1} was not applied: the gradient norm is {norm} though the loss is {total:.6g}"
            )
        lr = self.lr
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.optimizers.step()
        self.version = PolicyVersion(self.version.incarnation, self.version.step + 1)
        self.trained = (sum((r for r, _ in began), []), torch.cat([p for _, p in began])) if self._speaks and began else None
        return {**metrics, "loss": total, "grad_norm": norm, "lr": lr, "applied": 1.0}

    def _combine(self, total: float, sums: dict[str, list[float]], where: str | None):
        """The batch's loss and metrics over all data-parallel ranks, and where a loss was first not finite."""
        parts: list[Any] = [(total, sums, where)]
        if self._batch_group is not None:
            parts = [None] * self.parallel.batch_size
            dist.all_gather_object(parts, (total, sums, where), group=self._batch_group)
        metrics: dict[str, float] = {}
        for name in sorted({n for _, s, _ in parts for n in s}):
            have = [s[name] for _, s, _ in parts if name in s]
            metrics[name] = sum(x for x, _ in have) / max(1.0, sum(n for _, n in have))
        return sum(t for t, _, _ in parts), metrics, next((w for _, _, w in parts if w is not None), None)

    # ---- learning rate ----

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.config.lr_at(self.version.step, self.peak_lr)

    def set_lr(self, lr: float) -> float:
        """Make `lr` the peak rate from the next step on; the schedule goes on. Returns the next step's rate."""
        if not (math.isfinite(lr) and lr >= 0):
            raise ConfigError(f"learning rate must be 0 or above, not {lr}")
        self.peak_lr = lr
        return self.lr

    # ---- weights out ----

    def hf_shards(self) -> list[shards.Piece]:
        """This rank's pieces of the model under Hugging Face names; every slice is in one rank's list only."""
        if self._pieces is None:
            self._pieces = shards.plan(self.parameters)
        return self._pieces

    def publish(self, readers: Sequence[str], *, dtype: str | None = None, ttl_s: float = 60.0) -> RankManifest | None:
        """Pack this rank's pieces for `readers` to fetch. Raises TransferError where a reader still holds the slot."""
        started = time.perf_counter()
        pieces = [(p.name, p.tensor(), p.shape, p.offsets) for p in self.hf_shards()]
        # a rank whose every part is published by another has nothing to say
        manifest = self.sender.publisher.publish(self.version, pieces, readers, ttl_s, dtype) if pieces else None
        self.busy_s += time.perf_counter() - started
        return manifest

    def release(self, reader: str, version: PolicyVersion) -> None:
        """`reader` has read `version`; its slot may be used again. Releasing what is not leased is no fault."""
        if self._sender is not None:
            self._sender.publisher.release(reader, version)

    @property
    def sender(self) -> Any:
        """What sends the weights; made when first used, since it brings NIXL up."""
        if self._sender is None:
            from milkweed.training.sending import Sender

            self._sender = Sender(f"trainer{self.rank}", self.rank, self.hf_shards)
        return self._sender

    def send(self, method: str, *args: Any) -> Any:
        """One of the Sender's methods, its time counted."""
        started = time.perf_counter()
        try:
            return getattr(self.sender, method)(*args)
        finally:
            self.busy_s += time.perf_counter() - started

    def _whole(self):
        return shards.full_tensors(self.parameters)

    def export(self, folder: str, *, dtype: str = "float32") -> int:
        """Write a Hugging Face folder with this version's weights; whole or not there. Returns its weights' bytes."""
        if dtype not in EXPORT_DTYPES:
            raise ConfigError(f"export dtype {dtype!r} is unknown; known are {', '.join(EXPORT_DTYPES)}")
        if self.rank != 0:
            for _ in self._whole():
                continue
            return 0
        tensors = self._whole()
        try:
            with Partial(folder) as partial:
                cast = ((n, t.to("cpu", EXPORT_DTYPES[dtype]).contiguous().clone()) for n, t in tensors)
                size = write_weights(cast, partial.path)
                copy_side_files(Path(self.folder), partial.path, dtype, value_head=self.architecture.head == "value")
                partial.commit()
        finally:
            for _ in tensors:  # the other ranks gather to the end, whatever happened to the files
                continue
        return size

    def checksum(self) -> str:
        """Digest of all parameters, the same however they are cut: blake2b over name, shape and bytes of each."""
        digests = {}
        for name, tensor in self._whole():
            raw = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
            digests[name] = hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest() + str(list(tensor.shape))
        return hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).hexdigest()

    def stats(self) -> dict[str, Any]:
        """What the rank is and has done: version, rates, seconds busy, start-up seconds, peak memory in bytes."""
        import resource

        return {
            "version": str(self.version),
            "lr": self.lr,
            "busy_s": self.busy_s,
            "start_s": self.start_s,
            "rank": self.rank,
            "parameters": sum(p.numel() for p in self.parameters.values()),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def close(self) -> None:
        """Give back what this rank holds outside its memory."""
        if self._sender is not None:
            self._sender.publisher.close()
            self._sender = None
        for store in (self.checkpoints, self.copies):
            if store is not None:
                store.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def evaluate(
    loss: Callable[..., Any], micro: Batch, policy: Policy, sums: dict[str, list[float]]
) -> torch.Tensor:
    """This micro-batch's share of the batch's loss, a scalar; adds the metrics' (sum, count) to `sums`.

    Raises DataError where the loss returns neither `[rows, seq]` nor a scalar.
    """
    out = loss(micro, policy)
    out, metrics = out if isinstance(out, tuple) else (out, {})
    if not isinstance(out, torch.Tensor) or (out.ndim != 0 and out.shape != micro.tokens.shape):
        what = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise DataError(f"a loss returns a tensor {list(micro.tokens.shape)} or a scalar, not {what}")
    if out.ndim:
        # not a plain product: where the weight is 0 an infinite loss would become NaN
        out = torch.where(micro.weights != 0, out * micro.weights, torch.zeros((), dtype=out.dtype, device=out.device)).sum()
    trained = micro.mask
    count = float(trained.sum())
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            if value.shape != trained.shape:
                raise DataError(f"metric {name!r} must be {list(trained.shape)} or a scalar, not {list(value.shape)}")
            add = float(value.detach().float()[trained].sum())
        else:
            add = float(value) * count
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += add
        entry[1] += count
    return out
