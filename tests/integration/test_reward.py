"""Reward functions in real child processes: whatever one item does, it fails alone and in time, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from milkweed.data import arithmetic, from_reasoning_gym
from milkweed.environments import Scorer, by_answer, mathematical, reasoning_gym_score, single_turn, use
from milkweed.environments.children import Limits
from milkweed.errors import FleetError, RewardError
from milkweed.types import Completion, Prompt, Sampling

PROMPTS = arithmetic(digits=2, size=300)


def of(name, deadline_s=30.0, **limits):
    """A scorer for one test; every child of it dies with it."""
    return Scorer.local(2, deadline_s=deadline_s, limits=Limits(**limits))


async def outcomes(scorer, fn, samples, **options):
    """Reward or error text of every sample, in order."""
    tasks = [scorer.score(fn, PROMPTS[i], s, **options) for i, s in enumerate(samples)]
    got = await asyncio.gather(*tasks, return_exceptions=True)
    return [g.reward if isinstance(g, tuple) else str(g) if isinstance(g, RewardError) else g for g in got]


def run(scorer, work):
    async def main():
        try:
            return await work(scorer)
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(main(), 100))


def alive(mark):
    """Pids whose command line holds `mark`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue  # it ended while the list was read
    return found


def children(owner=None):
    """Children of this process's scorers, or of `owner`'s: its pid is the third argument."""
    found = []
    for pid in alive("environments/child.py\0"):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if file.read().split("child.py\0")[1].split("\0")[2] == str(owner or os.getpid()):
                    found.append(pid)
        except (OSError, IndexError):
            continue  # it ended between the two looks
    return found


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def misbehave(prompt, how):
    """What people's reward functions do."""
    import numpy as np

    match how:
        case "raise":
            raise ValueError("no such unit")
        case "nan":
            return float("nan")
        case "inf":
            return {"reward": 1.0, "part": float("inf")}
        case "none":
            return None
        case "text":
            return "1.0"
        case "exit":
            sys.exit(0)
        case "_exit":
            os._exit(0)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "close":
            os.closerange(0, 1000)
        case "numpy":
            return np.float32(0.5)
        case "bool":
            return True
        case "parts":
            return {"right": 1.0, "form": 0.25}
        case _:
            return {"reward": 1, "form": 0.25}


def test_every_way_to_fail_is_named_and_fails_alone():
    ways = "raise nan inf none text exit _exit segfault close numpy bool parts good".split()
    got = run(of("ways"), lambda s: outcomes(s, misbehave, ways))
    assert [g for g in got if isinstance(g, float)] == [0.5, 1.0, 1.25, 1.0]
    for i, words in enumerate(
        (
            "reward raised ValueError: no such unit (misbehave, line",
            "reward returned nan, not a finite number",
            "reward returned inf in 'part'",
            "reward returned None, not a number",
            "reward returned '1.0', not a number",
            "reward raised SystemExit",
            "reward process ended with exit code 0",
            "reward process ended by SIGSEGV",
            "reward ",
        )
    ):
        assert words in got[i] and f"prompt {PROMPTS[i].id}" in got[i], got[i]


def sleeps_in_finally(prompt, seconds):
    try:
        time.sleep(seconds)
    finally:
        time.sleep(seconds)
    return 1.0


def test_R20_R23_a_hang_costs_its_own_deadline_and_no_one_elses():
    start = time.monotonic()
    got = run(of("hang"), lambda s: outcomes(s, sleeps_in_finally, [0, 600, 0, 0, 600, 0], deadline_s=1.0))
    assert got[1].startswith("reward passed its deadline of 1 s (prompt") and got[4].startswith("reward passed")
    assert [got[i] for i in (0, 2, 3, 5)] == [1.0] * 4
    assert time.monotonic() - start < 20 and until(lambda: not children())


def test_a_function_that_always_hangs_is_given_up_and_tried_again_later():
    async def work(scorer):
        start = time.monotonic()
        first = await outcomes(scorer, sleeps_in_finally, [600] * 60, deadline_s=0.3)
        took = time.monotonic() - start
        await asyncio.sleep(0.1)
        return first, took, await outcomes(scorer, sleeps_in_finally, [0, 0], deadline_s=5.0)

    first, took, later = run(of("always", overruns=4), work)
    assert sum("deadline of" in f for f in first) <= 6 and sum("was not tried" in f for f in first) >= 54
    assert took < 20 and later == [1.0, 1.0]


def fork_bomb(prompt, how):
    if how == "bomb":
        while True:
            try:
                os.fork()
            except OSError:
                pass
    return 1.0


@pytest.mark.parametrize("namespace", [True, False])
def test_R23_a_fork_bomb_is_cut_off(namespace):
    scorer = of("bomb", deadline_s=10.0, processes=64, namespace=namespace)
    got = run(scorer, lambda s: outcomes(s, fork_bomb, ["good", "bomb", "good"]))
    assert got[0] == got[2] == 1.0
    assert "started more than 64 processes" in got[1] or "passed its deadline" in got[1]
    assert until(lambda: not children())


def flood(prompt, how):
    if how == "flood":
        for _ in range(1000):
            print("x" * 1_000_000)
    print("a word in passing")
    return 1.0


def test_R23_a_flood_of_output_is_cut_off_and_a_word_is_not():
    got = run(of("flood"), lambda s: outcomes(s, flood, ["word", "flood", "word"]))
    assert got[0] == got[2] == 1.0 and "printed more than 8 MiB" in got[1]


def hoard(prompt, gigabytes):
    return float(len(bytearray(gigabytes << 30)) > 0 or 1)


def test_memory_is_capped():
    got = run(of("memory", memory_bytes=1 << 30), lambda s: outcomes(s, hoard, [0, 8, 0]))
    assert got[0] == got[2] == 1.0 and "raised MemoryError" in got[1]


def leave_behind(prompt, mark):
    subprocess.Popen(["setsid", "sleep", mark])
    subprocess.Popen(f"nohup sleep {mark} &", shell=True, start_new_session=True)
    time.sleep(600)


@pytest.mark.parametrize("namespace", [True, False])
def test_the_kill_takes_descendants_that_hid_in_sessions_of_their_own(namespace):
    mark = f"{600 + os.getpid()}.{int(namespace)}5"
    scorer = of("hide", deadline_s=1.0, namespace=namespace)
    (got,) = run(scorer, lambda s: outcomes(s, leave_behind, [mark]))
    assert "passed its deadline" in got
    assert until(lambda: not alive(f"sleep\0{mark}"))


def test_the_children_die_with_their_owner():
    code = (
        "import asyncio, os, signal, sys\n"
        "from milkweed.environments import Scorer\n"
        "def slow(p, mark):\n"
        "    import subprocess; subprocess.Popen(['setsid', 'sleep', mark]); import time; time.sleep(600)\n"
        "async def main():\n"
        "    s = Scorer.local(2)\n"
        "    asyncio.ensure_future(s.score(slow, None, sys.argv[1], deadline_s=600))\n"
        "    await asyncio.sleep(3)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    mark = f"{700 + os.getpid()}.25"
    process = subprocess.Popen([sys.executable, "-c", code, mark])
    assert until(lambda: alive(f"sleep\0{mark}"), 20)
    assert process.wait(30) == -signal.SIGKILL
    assert until(lambda: not alive(f"sleep\0{mark}") and not children(process.pid))


def length(prompt, text):
    return len(text) + 0.5


def test_256_scores_take_a_handful_of_messages_and_little_of_the_controller():
    async def work(scorer):
        await outcomes(scorer, length, ["warm"])
        calls, cpu, busy, wall = scorer.calls, time.thread_time(), scorer.busy_s, time.monotonic()
        got = await outcomes(scorer, length, ["abc"] * 256)
        wall = time.monotonic() - wall
        return got, scorer.calls - calls, time.thread_time() - cpu, scorer.busy_s - busy, wall

    got, calls, cpu, busy, wall = run(of("many"), work)
    assert got == [3.5] * 256
    assert calls <= 40 and cpu < 0.15, (calls, cpu, wall)
    assert 0 < busy <= wall


def test_what_nobody_waits_for_is_not_run():
    async def work(scorer):
        task = asyncio.gather(*(scorer.score(sleeps_in_finally, p, 0.2) for p in PROMPTS[:200]))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        start = time.monotonic()
        assert (await scorer.score(length, PROMPTS[0], "abc")).reward == 3.5
        return time.monotonic() - start

    assert run(of("cancel"), work) < 5  # the rest of the queue would have taken 35 s


def test_a_function_is_read_again_when_what_it_uses_changed():
    namespace: dict = {}
    exec("BONUS = 1.0\ndef reward(prompt, text):\n    return BONUS", namespace)  # as a notebook cell does

    async def work(scorer):
        before = await scorer.score(namespace["reward"], PROMPTS[0], "")
        namespace["BONUS"] = 2.0
        await asyncio.sleep(1.1)
        return before.reward, (await scorer.score(namespace["reward"], PROMPTS[0], "")).reward

    assert run(of("cell"), work) == (1.0, 2.0)


class Fixed:
    """A policy that says the same every time."""

    def __init__(self, text, finish="stop"):
        self.text, self.finish = text, finish

    async def sample(self, token_ids, sampling=None):
        return Completion(
            prompt_ids=list(token_ids),
            token_ids=[7, 8],
            logprobs=[-1.0, -1.0],
            finish_reason=self.finish,
            versions=[],
            sampling=Sampling(),
            text=self.text,
        )


def picky(prompt, text, trajectory):
    if text == "bad":
        raise KeyError("bad")
    return {"reward": len(trajectory.token_ids), "text": 0.5}


def test_A14_a_sample_that_cannot_be_scored_is_dropped_and_never_zero():
    prompt = Prompt(id="p1", messages=[], token_ids=[1, 2, 3])

    async def work(scorer):
        with use(scorer):
            env = single_turn(picky)
            return [await env(prompt, Fixed(*a)) for a in (("good",), ("bad",), ("good", "abort"))]

    good, bad, aborted = run(of("drop"), work)
    assert (good.reward, good.reward_parts, good.dropped) == (5.0, {"text": 0.5}, None)
    assert bad.reward is None and bad.dropped.startswith("reward raised KeyError: 'bad'") and "p1" in bad.dropped
    assert aborted.reward is None and "abort" in aborted.dropped


def test_reasoning_gym_and_mathematics_are_scored_in_the_children():
    tasks = from_reasoning_gym("chain_sum", 3, 11)

    async def work(scorer):
        right = [await scorer.score(reasoning_gym_score, t, f"so <answer>{t.answer}</answer>") for t in tasks]
        wrong = await scorer.score(reasoning_gym_score, tasks[0], "<answer>x</answer>")
        sum_ = PROMPTS[0]
        boxed = await scorer.score(by_answer(mathematical), sum_, rf"\boxed{{\frac{{{2 * int(sum_.answer)}}}{{2}}}}")
        return [r.reward for r in right], wrong.reward, boxed.reward

    right, wrong, boxed = run(of("gym"), work)
    assert right == [1.0] * 3 and wrong < 0.5 and boxed == 1.0


@pytest.mark.stack
def test_reward_replicas_score_and_one_that_dies_loses_nothing(tmp_path):
    from milkweed.config import load_mesh
    from milkweed.environments.actor import RewardActor
    from milkweed.fleet import Fleet

    async def main():
        fleet = await Fleet.start(load_mesh("local"), tmp_path)
        try:
            replicas = await asyncio.gather(*(fleet.spawn("reward", i, RewardActor, 2) for i in range(2)))
            scorer = Scorer(replicas)
            first = await outcomes(scorer, length, ["abc"] * 256)
            calls, start = scorer.calls, time.monotonic()
            second = await outcomes(scorer, length, ["abcd"] * 256)
            wall, calls = time.monotonic() - start, scorer.calls - calls
            slow = asyncio.gather(*(scorer.score(sleeps_in_finally, p, 0.1) for p in PROMPTS[:20]))
            await asyncio.sleep(0.3)
            owners = [r.pids[0] for r in replicas]
            assert all(children(o) for o in owners)
            os.kill(owners[0], signal.SIGKILL)
            third = [s.reward for s in await slow]
            os.kill(owners[1], signal.SIGKILL)
            with pytest.raises(FleetError):
                await scorer.score(length, PROMPTS[0], "abc")
            await scorer.close()
            return first, second, third, calls, wall, owners
        finally:
            await fleet.stop()

    first, second, third, calls, wall, owners = asyncio.run(asyncio.wait_for(main(), 150))
    assert first == [3.5] * 256 and second == [4.5] * 256 and third == [1.0] * 20
    print(f"256 scores through Monarch: {calls} calls, {wall * 1e3:.0f} ms")
    assert calls <= 60
    assert until(lambda: not any(children(o) for o in owners))
