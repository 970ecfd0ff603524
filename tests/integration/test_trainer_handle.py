"""The controller's handle on a trainer, on a real fleet: losses by value, refusals as themselves, interrupts, weights out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from test_trainer import make_model
from trainer_scenarios import packed_batch

from milkweed.config import load_mesh
from milkweed.errors import ConfigError, DataError, StepRefused, TransferError
from milkweed.fleet import Fleet
from milkweed.training import Trainer, TrainerConfig
from milkweed.types import PolicyVersion

pytestmark = pytest.mark.stack


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_controller_trains_scores_publishes_saves_and_resumes(tmp_path):
    asyncio.run(asyncio.wait_for(_drive(tmp_path), 240))


async def _drive(tmp_path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    config = TrainerConfig(lr=1e-3, seq_len=64)
    batch = packed_batch()
    async with await Fleet.start(load_mesh("local")) as fleet:
        trainer = await Trainer.start(fleet, model, config, run_dir=tmp_path / "run")
        pid = trainer.replica.pids[0]
        scale = 2.0

        def loss(batch, policy):
            return -scale * policy.logprobs, {"nll": -policy.logprobs}

        before = await trainer.logprobs(batch)
        first = await trainer.update(batch, loss)
        assert first["loss"] == pytest.approx(2 * first["nll"], rel=1e-4)
        assert first["nll"] == pytest.approx(float(-(before * batch.weights).sum()), rel=1e-4)
        assert trainer.version == PolicyVersion(0, 1) and first["applied"] == 1
        assert trainer.trained is not None and (trainer.trained - before)[batch.mask].abs().max() < 1e-5
        assert trainer.loss_source is not None and "scale * policy.logprobs" in trainer.loss_source.source
        scale = 3.0
        second = await trainer.update(batch, loss)
        assert second["loss"] == pytest.approx(3 * second["nll"], rel=1e-4)
        assert 0 < second["seconds"] <= trainer.busy_s

        with pytest.raises(StepRefused, match="nan"):
            await trainer.update(batch, lambda batch, policy: policy.logprobs * float("nan"))
        with pytest.raises(DataError, match="seq_len"):
            await trainer.update(packed_batch(seq=128), loss)
        assert trainer.version == PolicyVersion(0, 2)

        def slow(batch, policy):
            import time

            time.sleep(0.5)
            return -policy.logprobs

        started = time.perf_counter()
        task = asyncio.create_task(trainer.update(batch, slow))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.perf_counter() - started < 0.45, "an interrupt must return at once"
        # the next call waits for the interrupted one, which happened whole
        assert await trainer.set_lr(2e-3) == 2e-3
        assert trainer.version == PolicyVersion(0, 3)

        manifest = await trainer.publish(["puller0"])
        assert manifest.version == trainer.version and trainer.publish_s > 0
        assert sum(len(r.shards) for r in manifest.ranks) == 25
        await trainer.publish(["puller0"])
        with pytest.raises(TransferError, match="puller0"):
            await trainer.publish(["puller1"])
        await trainer.release("puller0", manifest.version)
        await trainer.publish(["puller0"])

        await trainer.save({"position": [1, 2]})
        saved = await trainer.checksum()
        await trainer.update(batch, loss)
        assert await trainer.checksum() != saved
        assert await trainer.load() == {"position": [1, 2]}
        assert await trainer.checksum() == saved and trainer.version == PolicyVersion(1, 3)

        exported = await trainer.export(tmp_path / "exported")
        reference = await Trainer.start(fleet, exported, config, role="reference", optimise=False)
        assert await reference.checksum() == saved
        with pytest.raises(ConfigError, match="no optimiser"):
            await reference.update(batch, loss)
        await reference.close()
        with pytest.raises(DataError, match=r"config\.json"):
            await Trainer.start(fleet, tmp_path / "nothing", config, role="reference", optimise=False)
        await trainer.close()
        await asyncio.sleep(0.5)
        assert not alive(pid)


def test_ranks_that_are_killed_come_back_with_the_same_weights(tmp_path):
    async def main() -> None:
        model, batch = make_model(tmp_path / "model", "qwen3"), packed_batch()

        def loss(batch, policy):
            return -policy.logprobs

        async with await Fleet.start(load_mesh("local")) as fleet:
            trainer = await Trainer.start(fleet, model, TrainerConfig(lr=1e-3, seq_len=64), run_dir=tmp_path / "run")
            await trainer.update(batch, loss)
            await trainer.save()
            for lr in (1e-3, 5e-4):
                await trainer.set_lr(lr)
                await trainer.update(batch, loss)
            before, version, events = await trainer.checksum(), trainer.version, []
            trainer.history.note = events.append
            os.kill(trainer.replica.pids[0], signal.SIGKILL)
            began = time.monotonic()
            assert await trainer.checksum() == before and trainer.version == version == PolicyVersion(0, 3)
            assert time.monotonic() - began < 30
            assert [e.what for e in events] == ["failed", "replaced"] and events[0].kind == "died" and "2 steps trained again" in events[1].cause
            print(f"rebuilt after {events[1].after_s:.1f} s")

    asyncio.run(asyncio.wait_for(main(), 240))


def test_ranks_that_copy_themselves_into_memory_come_back_from_there_to_the_same_bits(tmp_path):
    async def main() -> None:
        model, batch = make_model(tmp_path / "model", "qwen3"), packed_batch()

        def loss(batch, policy):
            return -policy.logprobs

        async with await Fleet.start(load_mesh("local")) as fleet:
            config = TrainerConfig(lr=1e-3, seq_len=64, copy_every=1)
            trainer = await Trainer.start(fleet, model, config, run_dir=tmp_path / "run")
            copies = Path(f"/dev/shm/mw-{fleet.token}-copies-trainer0/checkpoints")
            await trainer.save()
            for step in range(1, 5):
                await trainer.update(batch, loss)
                while not (copies / f"step-{step}" / "sums-0.json").exists():
                    await asyncio.sleep(0.05)
            before, version, events = await trainer.checksum(), trainer.version, []
            trainer.history.note = events.append
            os.kill(trainer.replica.pids[0], signal.SIGKILL)
            assert await trainer.checksum() == before and trainer.version == version == PolicyVersion(0, 4)
            assert [e.what for e in events] == ["failed", "replaced"] and events[1].cause.endswith("steps trained again since its copy in memory")
            assert int(events[1].cause.split()[0]) <= 1
            after = await trainer.update(batch, loss)
            assert after["loss"] < 100 and len(list(copies.glob("step-*"))) <= 3
            # a copy that rots is seen, and the checkpoint is taken
            while not (copies / "step-5" / "sums-0.json").exists():
                await asyncio.sleep(0.05)
            before = await trainer.checksum()
            for step in range(1, 6):
                with contextlib.suppress(FileNotFoundError):  # an old one that went already
                    part = copies / f"step-{step}" / "__0_0.distcp"
                    part.write_bytes(part.read_bytes()[:-100] + bytes(100))
            events.clear()
            os.kill(trainer.replica.pids[0], signal.SIGKILL)
            assert await trainer.checksum() == before
            assert [e.what for e in events] == ["failed", "failed", "replaced"] and "in memory could not be read" in events[1].cause
            await trainer.close()
            assert not copies.exists()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_checkpoint_made_before_the_first_step_holds_everything(tmp_path):
    async def main() -> None:
        model, batch = make_model(tmp_path / "model", "qwen3"), packed_batch()

        def loss(batch, policy):
            return -policy.logprobs

        async with await Fleet.start(load_mesh("local")) as fleet:
            trainer = await Trainer.start(fleet, model, TrainerConfig(lr=1e-3, seq_len=64), run_dir=tmp_path / "run")
            await trainer.set_lr(5e-4)
            await trainer.save({"position": 7})
            losses = [(await trainer.update(batch, loss))["loss"] for _ in range(2)]
            assert await trainer.load(4, step=0) == {"position": 7}
            assert trainer.version == PolicyVersion(4, 0) and trainer.peak_lr == 5e-4
            assert [(await trainer.update(batch, loss))["loss"] for _ in range(2)] == losses
            await trainer.close()

    asyncio.run(asyncio.wait_for(main(), 240))
