"""Groups made ahead of the trainer, as far as the bound on staleness lets: the one loop, whatever the bound.

    issue --> sample, score --> filter --> buffer --> take --> trained
      ^            |  failed: again     |  rejected     |  over the bound
      +------------+--------------------+---------------+   dropped, and another is issued

A group is issued only if it can be trained in order within the bound: while the engines serve version v, batches for the
trainer's steps up to v + staleness may be on their way. At 0 this is the synchronous loop: a batch is sampled, taken
whole, trained and published before the next is begun. Whoever waits in `take` is woken by a finished group, by `served`
(new weights in the engines) or by a failure.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from milkweed.data.ledger.records import HeldGroup, Issue
from milkweed.errors import DataError, MilkweedError
from milkweed.runs.lineage import Lineage
from milkweed.runs.making import Limits, Made, Make, Records, Stream, live
from milkweed.types import Group, PolicyVersion, Prompt, Trajectory


class Generator:
    """Makes groups ahead and hands them out oldest first. `take`, train, `trained`, then publish and `serve`.

    `say` hears what a person should know. All of it runs in one event loop and touches no clock but that one's.
    """

    def __init__(
        self,
        limits: Limits,
        stream: Stream,
        make: Make,
        records: Records,
        *,
        name: str = "train",
        version: PolicyVersion = PolicyVersion(),
        lineage: Lineage | None = None,
        keep: Callable[[Group], bool] | None = None,
        numbers: Iterator[int] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.limits, self.stream, self.name = limits, stream, name
        self.keep, self.lineage = keep, lineage or Lineage()
        self._make, self._records, self._say = make, records, say
        self._numbers = numbers or itertools.count(1)
        self._served, self._next = version, version.step
        self._running: dict[int, Made] = {}
        self._buffer: dict[int, Made] = {}
        self._waiting: deque[tuple[Made, list[int]]] = deque()
        self._given: list[Made] = []
        self._given_rows: list[tuple[int, int, int, int]] = []
        self._again: dict[int, list[int]] = {}
        self._replaying = False
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._rejected_in_a_row = 0
        self.counts: dict[str, int] = {"rejected": 0, "retried": 0, "stale": 0, "masked_tokens": 0, "over-sampled": 0}
        """What was not trained since the last look, for the metrics."""
        self.lags: list[int] = []
        """The oldest token of each trajectory of the last batch, in steps."""

    # ---- what the run calls

    async def take(self, now: PolicyVersion) -> list[Group]:
        """The batch to train at `now`: the oldest groups that are finished, at most `limits.groups`, every token to be
        trained within the bound. Waits for them. Groups handed out before and never trained are dropped.

        Raises what ended the sampling (FleetError), DataError where nothing passes the filter or can be scored.
        """
        for made in self._given:
            self._records.drop(made.number, live(made), "handed out but not trained")
        self._given, self._next = [], now.step
        if (planned := self._planned(now)) is not None:
            return self._hand_out(planned, now)  # what was sampled after it is not old until the steps up to there are done again
        self._expire(now)
        while True:
            self._raise()
            await self._records.room()
            self._admit()
            if self._due(now) is not None:
                self._expire(now)
                if (due := self._due(now)) is not None:
                    return self._hand_out(due, now)
                continue  # what had waited too long is gone, and others are issued in its place
            self._changed.clear()
            try:
                async with asyncio.timeout(self.limits.stalled_s):
                    await self._changed.wait()
            except TimeoutError:
                raise MilkweedError(f"no group was finished for {self.limits.stalled_s:g} s: {self.state()}") from None

    def trained(self, version: PolicyVersion) -> bool:
        """The groups taken last made `version`. False where none were taken since the last step: nothing is written."""
        if not self._given:
            return False
        self._records.train(version, self._given_rows, again=self._replaying)
        self.lineage.trained(version, list(dict.fromkeys(number for number, *_ in self._given_rows)))
        self._given, self._given_rows = [], []
        return True

    def serve(self, version: PolicyVersion) -> None:
        """The engines serve `version` now."""
        self._served = version
        if self.limits.staleness:  # at 0 a batch is begun when it is asked for
            self._admit()
        self._changed.set()

    def restore(self, held: Sequence[HeldGroup], prompts: Callable[[int], Prompt], again: dict[int, list[int]]) -> None:
        """Takes up what a former life held: finished samples are kept, the others sampled anew. Raises DataError where
        the data are not what they were."""
        self._again = dict(again)
        for h in held:
            prompt = prompts(h.issue.position)
            if prompt.id != h.issue.prompt_id:
                raise DataError(
                    f"prompt {h.issue.position} of stream {h.issue.stream} was {h.issue.prompt_id} and is now {prompt.id}: resume with the data the run began with"
                )
            made = Made(h.issue, prompt, self._served, self._next, dict(h.finished))
            if h.unfinished:
                self._waiting.append((made, h.unfinished))
            else:
                self._completed(made)

    def fail(self, error: BaseException) -> None:
        """Ends the loop with `error`; whoever waits in `take` gets it."""
        self._failure = self._failure or error
        self._changed.set()

    async def close(self) -> None:
        """Stops what is being sampled; the ledger holds it for the next life."""
        self.fail(MilkweedError("the generator was closed"))
        tasks = [t for made in self._running.values() for t in made.running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def state(self) -> str:
        """For people."""
        samples = sum(len(m.running) for m in self._running.values())
        return (
            f"{len(self._running)} groups being sampled ({samples} samples), {len(self._buffer)} waiting, {self.limits.groups} a batch; "
            f"engines serve {self._served}, the next batch is for step {self._next + 1}, staleness {self.limits.staleness}"
        )

    @property
    def outstanding(self) -> int:
        """Groups on their way: being sampled, or finished and not taken."""
        return len(self._running) + len(self._buffer)

    # ---- issuing

    def _admit(self) -> None:
        """Issues what may be trained in order within the bound, and no more."""
        if self._failure is not None:
            return
        batches = min(self._served.step + self.limits.staleness + 1, self.limits.steps) - self._next
        room = self.limits.cohort * batches - self.outstanding
        while room > 0 and self._waiting:  # of a former life: issued already, begun when within the bound
            made, unfinished = self._waiting.popleft()
            made.begun, made.due = self._served, self._next + self.outstanding // self.limits.cohort
            self._begin(made, unfinished)
            room -= 1
        if room <= 0:
            return
        issues, begun = [], []
        for _ in range(room):
            position, (prompt,) = self.stream.taken, self.stream.take(1)
            issue = Issue(
                number=next(self._numbers),
                group=f"{self.name}:{position}",
                stream=self.name,
                position=position,
                epoch=self.stream.epoch,
                seed=self.stream.seed,
                prompt_id=prompt.id,
                samples=self.limits.samples,
            )
            issues.append(issue)
            begun.append(Made(issue, prompt, self._served, self._next + (self.outstanding + len(begun)) // self.limits.cohort))
        self._records.issue(issues)
        for made in begun:
            self._begin(made, range(self.limits.samples))

    def _begin(self, made: Made, samples: Sequence[int]) -> None:
        self._running[made.number] = made
        for sample in samples:
            made.running[sample] = asyncio.create_task(self._sample(made, sample))

    async def _sample(self, made: Made, sample: int) -> None:
        attempt = 0
        try:
            while True:
                began = asyncio.get_running_loop().time()
                t = await self._make(made.prompt, made.issue, sample, attempt)
                if t.dropped is None or t.dropped.startswith("data:") or attempt >= self.limits.retries:
                    break
                self._records.fail(made.number, sample, attempt, t.dropped)
                self.counts["retried"] += 1
                attempt += 1
            self._records.finish(made.number, t, asyncio.get_running_loop().time() - began)
            made.trajectories[sample] = t
            del made.running[sample]
            if not made.running:
                self._completed(made)
                self._admit()
                self._changed.set()
        except Exception as error:  # handed on: `take` raises it
            self.fail(error)

    # ---- finished groups

    def _completed(self, made: Made) -> None:
        self._running.pop(made.number, None)
        group = made.group()
        if not group.scored:
            self._reject(made, None)
        elif self.keep is not None and not self.keep(group):
            self._reject(made, "rejected by the filter")
        else:
            self._rejected_in_a_row = 0
            self._buffer[made.number] = made

    def _reject(self, made: Made, reason: str | None) -> None:
        """Not one scored sample (each was dropped with its reason), or the filter's no."""
        if reason is not None:
            self._records.drop(made.number, live(made), reason)
        self.counts["rejected"] += 1
        self._rejected_in_a_row += 1
        why = reason or next((t.dropped for t in made.trajectories.values() if t.dropped), None) or "nothing to train"
        if self._rejected_in_a_row == 2 * self.limits.groups:
            self._say(f"the last {self._rejected_in_a_row} groups were all turned away, the last: {why}")
        if self._rejected_in_a_row >= self.limits.patience * self.limits.groups:
            self.fail(
                DataError(
                    f"{self._rejected_in_a_row} groups in a row were turned away, the last ({made.issue.group}): {why}; "
                    "nothing is left to train on: look at the rewards, or at the filter"
                )
            )

    def _expire(self, now: PolicyVersion) -> None:
        for number, made in list(self._buffer.items()):
            if all(self._fresh(made.trajectories[i], now) is None for i in live(made)):
                del self._buffer[number]
                self._records.drop(number, live(made), "stale")
                self.counts["stale"] += 1

    def _fresh(self, t: Trajectory, now: PolicyVersion) -> tuple[Trajectory, int] | None:
        """`t` with only tokens within the bound set to be trained, and the lag of the oldest of them; None where it has
        none."""
        oldest, masks = 0, {}
        for n, sequence in enumerate(t.sequences):
            for span in sequence.versions:
                lag = self.lineage.lag(span.version, now)
                if lag > self.limits.staleness:
                    mask = masks.setdefault(n, list(sequence.loss_mask))
                    mask[span.start : span.end] = [False] * (span.end - span.start)
                else:
                    oldest = max(oldest, lag)
        if not masks:
            return t, oldest
        *segments, last = (
            msgspec.structs.replace(s, loss_mask=masks.get(n, s.loss_mask), segments=[]) for n, s in enumerate(t.sequences)
        )
        kept = msgspec.structs.replace(last, segments=segments)
        return (kept, oldest) if kept.sampled else None

    def _due(self, now: PolicyVersion) -> list[Made] | None:
        """The oldest groups of a full batch, or None while there is none yet."""
        if len(self._buffer) < self.limits.groups:
            return None
        if self.limits.late == "wait" and not self.limits.oversample:
            if any(self.lineage.lag(m.begun, now) >= self.limits.staleness for m in self._running.values()):
                return None
        return [self._buffer[n] for n in sorted(self._buffer)[: self.limits.groups]]

    def _planned(self, now: PolicyVersion) -> list[Made] | None:
        """What the step after `now` trained in a former life; from the first that is not whole any more, nothing."""
        numbers = self._again.pop(now.step + 1, None)
        self._replaying = numbers is not None and all(n in self._buffer for n in numbers)
        if not self._replaying:
            self._again.clear()
            return None
        return [self._buffer[n] for n in numbers or ()]

    def _hand_out(self, chosen: Sequence[Made], now: PolicyVersion) -> list[Group]:
        self._given, rows, groups, self.lags = [], [], [], []
        for made in chosen:
            del self._buffer[made.number]
            stale = []
            for sample in live(made):
                t = made.trajectories[sample]
                fresh = self._fresh(t, now)
                if fresh is None:
                    stale.append(sample)
                    made.trajectories[sample] = msgspec.structs.replace(t, dropped="stale")
                    continue
                kept, lag = fresh
                trained = kept.sampled
                self.counts["masked_tokens"] += t.sampled - trained if kept is not t else 0
                made.trajectories[sample] = kept
                self.lags.append(lag)
                rows.append((made.number, sample, lag, trained))
            if stale:
                self._records.drop(made.number, stale, "stale")
                self.counts["stale"] += 1
            self._given.append(made)
            groups.append(made.group())
        self._given_rows, self._next = rows, now.step + 1
        if self.limits.oversample:
            self._give_up_the_tail(now)
        self._admit()
        return groups

    def _give_up_the_tail(self, now: PolicyVersion) -> None:
        for number, made in list(self._running.items()):
            if made.due <= now.step:
                for task in made.running.values():
                    task.cancel()
                self._records.drop(number, sorted([*made.running, *live(made)]), "over-sampled", "the batch was full before it was finished")
                self.counts["over-sampled"] += 1
                del self._running[number]

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


__all__ = ["Generator", "Limits"]
