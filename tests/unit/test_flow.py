"""What goes on behind a run's loop, around a model mesh: turns that outlive a life, lists, lost updates."""

import asyncio

import pytest
from flow_support import prompts, run_virtual

from milkweed.data import PromptStream
from milkweed.data.ledger import audit
from milkweed.errors import TransferError
from milkweed.runs.config import RunConfig
from milkweed.runs.flow import Flow
from milkweed.types import Completion, Group, PolicyVersion, Sampling, VersionSpan


class Router:
    """Answers at once, and counts what it was asked."""

    def __init__(self):
        self.version, self.asked = PolicyVersion(), []

    async def sample(self, token_ids, sampling, *, name):
        self.asked.append(list(token_ids))
        span = VersionSpan(0, 1, self.version)
        return Completion(prompt_ids=list(token_ids), token_ids=[9], logprobs=[-0.5], finish_reason="stop", versions=[span], sampling=sampling, text="x")


class Mesh:
    def __init__(self, version=PolicyVersion(), lost=0):
        self.rollout, self.reward, self.chat, self.version, self.update_deadline_s, self.lost = Router(), None, None, version, 10.0, lost
        self.environment = None
        self.rollout.version = version

    async def publish(self, offered=lambda: None):
        offered()
        if self.lost:
            self.lost -= 1
            raise TransferError("no host got it")
        self.rollout.version = self.version
        return {"update": 0.1}

    def train(self):
        self.version = PolicyVersion(self.version.incarnation, self.version.step + 1)


def flow(folder, mesh, said, **config):
    made = Flow(RunConfig(**{"steps": 9, **config}), folder, mesh, said.append, threaded=False)
    made.resume(mesh.version, same=True)
    return made


async def take(f, env, stream):
    return await f.take(env, stream, "train", groups=1, samples=1, sampling=Sampling(), keep=None)


def test_turns_of_an_unfinished_trajectory_are_not_sampled_again_by_the_next_life(tmp_path):
    def env(die):
        async def two_turns(task, policy):
            one = await policy.sample([1, 2])
            two = await policy.sample([1, 2, *one.token_ids, 3])
            if die:
                await policy.sample([0])
                await asyncio.sleep(1e6)
            return two.trajectory(reward=1.0)

        return two_turns

    async def main():
        stream, said = PromptStream(prompts()), []
        first = flow(tmp_path, Mesh(), said)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await take(first, env(True), stream)
        await first.close()
        mesh = Mesh(PolicyVersion(1, 0))
        second = flow(tmp_path, mesh, said)
        fresh = PromptStream(prompts())
        second.place(fresh, "train")
        groups = await take(second, env(False), fresh)
        assert mesh.rollout.asked == [], "both turns came from the ledger"
        assert groups[0].trajectories[0].token_ids == [1, 2, 9, 3, 9]
        await second.close()

    run_virtual(main())
    assert audit(tmp_path).agrees


def test_one_lost_update_is_said_and_made_good_and_the_second_in_a_row_is_raised(tmp_path):
    async def env(task, policy):
        return (await policy.sample(task.token_ids)).trajectory(reward=1.0)

    async def main(lost, folder):
        said, mesh, stream = [], Mesh(lost=lost), PromptStream(prompts())
        f = flow(folder, mesh, said, staleness=1)
        try:
            for _ in range(4):
                await take(f, env, stream)
                mesh.train()
                f.trained(mesh.version)
                await f.publish()
        finally:
            await f.close()
        assert mesh.rollout.version.step >= 3
        return said

    assert "stay at 0.0" in run_virtual(main(1, tmp_path / "one"))[0]
    with pytest.raises(TransferError):
        run_virtual(main(2, tmp_path / "two"))
    assert audit(tmp_path / "one").agrees and audit(tmp_path / "two").agrees


def test_groups_from_a_list_are_counted_too(tmp_path):
    said, mesh = [], Mesh()
    f = flow(tmp_path, mesh, said, staleness=1)
    completion = run_virtual(mesh.rollout.sample([1, 2], Sampling(), name="s"))
    for n in range(3):
        group = Group(id=f"{n}/p", prompt=prompts(1)[0], trajectories=[completion.trajectory(reward=1.0), completion.trajectory()])
        group.trajectories[1].index, group.trajectories[1].dropped = 1, "RewardError: it raised"
        f.listed([group])
        if n:
            mesh.train()
            f.trained(mesh.version)
    run_virtual(f.before_checkpoint())
    f.after_checkpoint(mesh.version)
    run_virtual(f.close())
    report = audit(tmp_path)
    assert report.agrees and report.trained == 2
    assert report.dropped == {"RewardError": 3, "handed out but not trained": 1}


def test_a_run_of_several_updates_on_each_batch_can_be_resumed(tmp_path):
    async def env(task, policy):
        return (await policy.sample(task.token_ids)).trajectory(reward=1.0)

    async def main():
        said, mesh, stream = [], Mesh(), PromptStream(prompts())
        f = flow(tmp_path, mesh, said)
        for _ in range(2):
            await take(f, env, stream)
            for _ in range(2):
                mesh.train()
                f.trained(mesh.version)
            await f.publish()
        await f.before_checkpoint()
        f.after_checkpoint(mesh.version)
        await f.close()
        assert mesh.version.step == 4
        second = flow(tmp_path, Mesh(PolicyVersion(1, 4)), said)
        fresh = PromptStream(prompts())
        second.place(fresh, "train")
        assert fresh.taken == stream.taken
        await second.close()

    run_virtual(main())
    assert audit(tmp_path).agrees


def test_evaluation_runs_beside_training_under_the_version_it_names_and_nothing_of_it_is_counted(tmp_path):
    async def env(task, policy):
        return (await policy.sample(task.token_ids)).trajectory(reward=1.0)

    async def main():
        said, mesh, stream = [], Mesh(), PromptStream(prompts())
        f, loop, seen = flow(tmp_path, mesh, said, staleness=2), asyncio.get_running_loop(), []

        async def exam():
            for _ in range(10):
                await asyncio.sleep(1)
                seen.append((await mesh.rollout.sample([1], Sampling(), name="exam")).versions[0].version)

        began = loop.time()
        for step in range(4):
            await take(f, env, stream)
            mesh.train()
            f.trained(mesh.version)
            await f.publish()
            if step == 0:
                await f.delivered()
                f.evaluate(exam())
        # two further steps were within the bound, the one after them had to wait for newer weights, and so for the exam
        assert mesh.version.step == 4 and 10 <= loop.time() - began < 11
        await f.evaluated()
        await f.delivered()
        assert seen == [PolicyVersion(0, 1)] * 10 and mesh.rollout.version == mesh.version
        await f.close()

    run_virtual(main())
    report = audit(tmp_path)
    assert report.agrees and report.max_lag <= 2 and report.issued == report.trained + sum(report.dropped.values()) + report.held
    assert report.issued <= 4 + 3


def test_over_sampling_stops_the_tail_in_the_engines_and_goes_on_without_it(tmp_path):
    stopped, begun = [], []

    async def env(task, policy):
        begun.append(task.id)
        try:
            await asyncio.sleep(1 if len(begun) % 3 else 100)
        except asyncio.CancelledError:
            stopped.append(task.id)
            raise
        return (await policy.sample(task.token_ids)).trajectory(reward=1.0)

    async def main():
        said, mesh, stream = [], Mesh(), PromptStream(prompts())
        f, loop = flow(tmp_path, mesh, said, oversample=0.5), asyncio.get_running_loop()
        for _ in range(3):
            groups = await f.take(env, stream, "train", groups=2, samples=1, sampling=Sampling(), keep=None)
            assert len(groups) == 2
            mesh.train()
            f.trained(mesh.version)
            await f.publish()
        assert loop.time() < 5, "nobody waited for the tail"
        await f.close()

    run_virtual(main())
    report = audit(tmp_path)
    assert report.agrees and len(stopped) == 3 and report.dropped == {"over-sampled": 3} and report.unsaved == 6
