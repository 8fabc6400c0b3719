"""Copies of checkpoints in the memory of nodes: where, and how often."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import checkpoints
from checkpoints import LatestN, SaveHandle, SaveOutcome, SaveStatus, Storage, TieredStorage
from checkpoints.engine import Engine
from checkpoints.memory import memory_roots, own_memory
from elastic.errors import Clock
from elastic.groups.collectives import all_gather_json
from elastic.train.state import JobState
from elastic.tuning.intervals import (
    MEMORY_WAIT_S,
)

# The longest chosen interval between two saves to memory, even if they cost more than they should:
# a death loses up to two intervals, and a checkpoint on disk is hardly older.
MEMORY_LONGEST_S = 300.0

# ----------------------------------------------------------------------------
# The choice of the interval between two saves to the nodes' memory: a pure function.
#
# A death costs the steps since the last save, so the interval is the shortest one at which saves
# take no more than a given fraction of training time. If a save costs C, that is C / fraction.
# Young's optimum is sqrt(2 C M) for a mean time M between failures (J. W. Young, "A first order
# approximation to the optimum checkpoint interval", 1974); both are equal where M is C / (2
# fraction²). With 1 %, a save of 2 s and a failure every three hours, both are 200 s. Cheaper
# saves are more frequent than at the optimum, which depends on the unknown M, and still cost 1 %.

UNMEASURED_STEPS = 10  # the interval before anything is measured
LONGEST_STEPS = 1000
_SLACK = 1.25  # an interval is kept while it is affordable and at most this factor too long


@dataclass(frozen=True, kw_only=True)
class MemoryCosts:
    """The costs of saves to memory: measured by one rank, or combined from all ranks."""

    every_steps: int | None = None  # the interval in use; None: unknown to this rank
    wait_s: float | None = None  # time that training waits for a save
    write_s: float | None = None  # time to write a share while training continues
    step_s: float | None = None  # time of a step without these saves


@dataclass(frozen=True)
class ChosenInterval:
    """The interval to use from now on."""

    every_steps: int
    reason: str  # a sentence without its full stop


def combine(ranks: Sequence[MemoryCosts]) -> MemoryCosts:
    """Combine the costs of a world's ranks, in order: all of them wait for the slowest."""
    return MemoryCosts(
        every_steps=next((r.every_steps for r in ranks if r.every_steps is not None), None),
        wait_s=max((r.wait_s for r in ranks if r.wait_s is not None), default=None),
        write_s=max((r.write_s for r in ranks if r.write_s is not None), default=None),
        step_s=min((r.step_s for r in ranks if r.step_s is not None), default=None),
    )


def choose(costs: MemoryCosts, overhead: float) -> ChosenInterval:
    """The shortest interval at which saves take at most ``overhead`` of training time.

    At least 1 step, and longer than the write of a share; at most ``LONGEST_STEPS`` and
    ``MEMORY_LONGEST_S``, which bound the lost work regardless of the cost of a save.

    >>> choose(MemoryCosts(every_steps=10, wait_s=0.012, step_s=0.180), 0.01)
    ChosenInterval(every_steps=7, reason='a save costs 12 ms, a step 180 ms')
    """
    current = costs.every_steps or UNMEASURED_STEPS
    if costs.wait_s is None or costs.step_s is None:
        return ChosenInterval(current, "not measured yet")
    step_s = max(costs.step_s, 1e-6)  # the resolution of measurements
    reason = f"a save costs {_shown(costs.wait_s)}, a step {_shown(costs.step_s)}"
    shortest = max(1, math.ceil(costs.wait_s / step_s / overhead))
    if costs.write_s is not None and (write_steps := math.ceil(costs.write_s / step_s)) >= shortest:
        shortest = write_steps + 1
        reason += f", and its share is written in {_shown(costs.write_s)}"
    bearable = math.floor(MEMORY_LONGEST_S / step_s)
    longest = max(1, min(LONGEST_STEPS, bearable))
    if shortest > longest:
        taken = costs.wait_s / (costs.wait_s + longest * step_s)
        return ChosenInterval(
            longest,
            f"{reason}; saves take {taken:.0%} of the time: a longer interval would lose more",
        )
    if shortest <= current <= min(longest, shortest * _SLACK):
        return ChosenInterval(current, reason)
    return ChosenInterval(shortest, reason)


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


# ----------------------------------------------------------------------------
# Measures on one rank what saves to memory cost, and how long steps take without them.

FIRST_STEPS = 2  # of a world: they compile, allocate and open connections
FIRST_SAVES = 1  # of a world: its buffers are allocated
_STEPS, _SAVES = 32, 8  # the median of this many recent ones counts, across worlds


class CostMeter:
    """One per process. At each boundary between two steps :meth:`reached`, :meth:`waited` and
    :meth:`left` are called, in this order. A save's cost is the time to begin it, and the wait at
    the next boundary until its share is written."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._waits: deque[float] = deque(maxlen=_SAVES)
        self._writes: deque[float] = deque(maxlen=_SAVES)
        self.enter_world()

    def enter_world(self) -> None:
        """Begin a world: its first steps and its first save do not count."""
        self.saves = 0  # completed in this world
        self._boundaries = 0
        self._step = 0
        self._reached_s = self._waited_s = self._left_s = 0.0
        self._has_saved = False  # the writers have, at the last boundary
        self._began_in_s: float | None = None  # this rank's part of that save

    def reached(self, step: int) -> None:
        """Record that a boundary is reached, with ``step`` steps done."""
        self._reached_s = self._clock.monotonic()
        if self._boundaries > FIRST_STEPS and step > self._step:
            self._steps.append((self._reached_s - self._left_s) / (step - self._step))
        self._boundaries += 1
        self._step = step

    def waited(self) -> bool:
        """Record the end of the wait for the last save. Returns whether there was one."""
        self._waited_s = self._clock.monotonic()
        if not self._has_saved:
            return False
        self.saves += 1
        if self._began_in_s is not None and self.saves > FIRST_SAVES:
            self._waits.append(self._began_in_s + self._waited_s - self._reached_s)
        self._has_saved, self._began_in_s = False, None
        return True

    def left(self, *, has_saved: bool, is_writer: bool = True) -> None:
        """Record that the boundary is left, and whether a save has begun at it. A rank that writes
        no part counts the saves of the others, and has no costs."""
        self._left_s = self._clock.monotonic()
        self._has_saved = has_saved
        if has_saved and is_writer:
            self._began_in_s = self._left_s - self._waited_s

    def wrote(self, write_s: float) -> None:
        """Record that a share was written while training continued."""
        self._writes.append(write_s)

    def costs(self, every_steps: int | None) -> MemoryCosts:
        """The medians of recent measurements, with the interval in use."""
        return MemoryCosts(
            every_steps=every_steps,
            wait_s=_median(self._waits),
            write_s=_median(self._writes),
            step_s=_median(self._steps),
        )


def _median(values: deque[float]) -> float | None:
    return median(values) if values else None


# ----------------------------------------------------------------------------
# The interval in use between two saves to memory, the same on all ranks of a world.
#
# A rank's part of a checkpoint in memory is useless without the other ranks' parts, so all must
# save the same steps. Measurements differ between ranks. They exchange them at a world's first
# boundary, after its second and its fourth save, and then at most every ``AGAIN_STEPS`` steps,
# with one small collective. All ranks apply the same function to the same numbers. A joining rank
# has none, and adopts the interval of the others.

AGAIN_STEPS = 100
# A world agrees after this many saves: one counts then, and three, of which one may be an outlier.
_EARLY = (2, 4)

Changed = Callable[[ChosenInterval, int], object]


class MemoryInterval:
    """One per process. ``every_steps``: fixed by the user; None: chosen from measured costs.

    ``changed`` is called with a new choice and the previous interval.
    """

    def __init__(
        self, every_steps: int | None, *, overhead: float, clock: Clock, changed: Changed
    ) -> None:
        self.is_chosen = every_steps is None
        self.first_steps = every_steps or UNMEASURED_STEPS
        self.every_steps = self.first_steps
        self._overhead = overhead
        self._changed = changed
        self.meter = CostMeter(clock)
        self._is_agreed = False  # this rank has taken part in an agreement
        self._agreed_step = 0
        self.enter_world(1)

    def enter_world(self, size: int) -> None:
        """Begin a world: its ranks agree at their first boundary."""
        self._size = size
        self.needs_agreement = self.is_chosen
        self._previous_step = -1
        self.meter.enter_world()

    def agree(self, step: int) -> None:
        """Choose the interval. A collective: all ranks call it at the same boundary."""
        self.needs_agreement = False
        self._agreed_step = step
        own = self.meter.costs(self.every_steps if self._is_agreed else None)
        ranks = [own]
        if self._size > 1:
            ranks = [MemoryCosts(**received) for received in all_gather_json(asdict(own))]
        costs = combine(ranks)
        chosen = choose(costs, self._overhead)
        self._is_agreed = True
        self.every_steps = chosen.every_steps
        before = costs.every_steps or UNMEASURED_STEPS
        if chosen.every_steps != before:
            self._changed(chosen, before)

    def is_due(self, step: int) -> bool:
        """Whether all ranks save at this boundary. Called after the wait for earlier saves."""
        has_ended = self.meter.waited()
        saves = self.meter.saves
        is_again = saves > max(_EARLY) and step - self._agreed_step >= AGAIN_STEPS
        if self.is_chosen and has_ended and (saves in _EARLY or is_again):
            self.needs_agreement = True  # at the next boundary, before its saves
        # With accumulated gradients several steps lie between two boundaries.
        before = self._previous_step if 0 <= self._previous_step < step else step - 1
        self._previous_step = step
        return step // self.every_steps != before // self.every_steps


# ----------------------------------------------------------------------------
# Frequent, asynchronous saves to the nodes' memory, between two saves to disk.
#
# The agents host that memory (:mod:`checkpoints.memory`), so it survives the workers. Each
# agent also has a copy of another agent's parts, which survives the loss of a node. If no rank
# with the state survives, a new world resumes from the newest checkpoint in memory or on disk.

VARIABLE = "ELASTIC_NODE_MEMORY"
KEEP = LatestN(3)  # ranks write at different speeds, and a checkpoint needs all parts

Report = Callable[[str, str], object]


class MemoryTier:
    """This rank's saves to its node's memory. ``report`` gets each skipped save and its reason."""

    def __init__(
        self,
        interval: MemoryInterval,
        *,
        report: Report,
        clock: Clock,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.interval = interval
        self._report = report
        self._failure = ""  # the last reported one
        self._saved_step = -1  # in this world
        self._is_owed = False  # the next boundary at which that is possible saves
        self._engine: Engine | None = None
        self.waits = False  # training waits if this rank's writes fall behind
        folder = node_memory(env)
        if folder is None:
            self._report_once(
                "memory", "no agent hosts memory here: checkpoints are saved to disk only"
            )
            return
        try:
            storage = own_memory(folder)
        except OSError as error:
            self._report_once("memory", f"the agent's memory cannot be used: {error}")
            return
        self._engine = Engine(storage, keep=KEEP, clock=clock.wall, monotonic=clock.monotonic)

    @property
    def is_hosted(self) -> bool:
        """Whether this node's agent hosts memory that can be used."""
        return self._engine is not None

    def enter_world(self, size: int, *, saves_first: bool) -> None:
        """Begin a world. ``saves_first``: all its writers save at its first boundary, too."""
        self.interval.enter_world(size)
        self._saved_step = -1
        self._is_owed = saves_first

    def at_boundary(
        self,
        job: JobState,
        world: checkpoints.WriterGroup,
        *,
        is_writer: bool = True,
    ) -> None:
        """Save between two steps if a save is due and a buffer is free. Waits only if
        :attr:`waits` is set, until the share of an earlier boundary is written.

        ``is_writer``: whether this rank writes a share; the others only follow the interval.
        """
        step = job.progress.step
        self.interval.meter.reached(step)
        if self._engine is not None:
            if self.waits:
                self._engine.finish_writing(MEMORY_WAIT_S)
            self.poll()
        saves = self.interval.is_due(step) or self._is_owed
        self._is_owed = False
        if saves and step != self._saved_step:
            self._saved_step = step
            if is_writer:
                self.begin(job, world, wait_s=0.0)
        self.interval.meter.left(has_saved=saves, is_writer=is_writer)

    def save_now(self, job: JobState, world: checkpoints.WriterGroup, budget_s: float) -> None:
        """Write this rank's share of the current step unless its write has begun, and wait."""
        if self._engine is None:
            return
        if job.progress.step != self._saved_step:
            self._saved_step = job.progress.step
            self.begin(job, world, wait_s=budget_s)
        self._engine.finish_writing(budget_s)
        self.poll()

    def begin(
        self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float
    ) -> SaveHandle | None:
        """Pass this rank's share of a checkpoint of ``world`` to the engine, if there is one."""
        if self._engine is None:
            return None
        handle = self._engine.save_async(
            job.saved_tree(),
            step=job.progress.step,
            world=world,
            data_position=job.data_position(),
            wait_s=wait_s,
        )
        self.poll()
        return handle

    def poll(self) -> None:
        """Report finished saves."""
        for outcome in self._engine.outcomes() if self._engine is not None else ():
            self._ended(outcome)

    def close(self) -> None:
        """Drop incomplete writes; other tiers and older checkpoints have the state."""
        if self._engine is not None:
            self._engine.close(0.0)
            self.poll()

    def _ended(self, outcome: SaveOutcome) -> None:
        if outcome.status is SaveStatus.COMMITTED:
            self._failure = ""
            if not self.waits:
                self.interval.meter.wrote(outcome.write_s)
        else:
            self._report_once(outcome.name, f"memory: {outcome.status.value}: {outcome.reason}")

    def _report_once(self, name: str, reason: str) -> None:
        """Report a failure once while it lasts: it may occur every few steps."""
        if not self._failure:
            self._failure = reason
            self._report(name, reason)


def node_memory(env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that this node's agent hosts, if there is one."""
    folder = env.get(VARIABLE)
    return Path(folder) if folder else None


@contextlib.contextmanager
def everywhere(disk: Storage, report: Report) -> Iterator[Storage]:
    """The disk and all nodes' memory combined, for reading; failures are reported."""
    folder = node_memory()
    try:
        memory = memory_roots(folder) if folder is not None else []
    except OSError as error:
        report("memory", f"the agent's memory cannot be used: {error}")
        memory = []
    tiers = TieredStorage([*memory, disk])
    try:
        yield tiers
    finally:
        for failure in tiers.failures:
            report("memory", f"{failure.place}: {failure.reason}")
        tiers.close()
