"""The shared page in which a worker says what it does, and how long each phase may take."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import mmap
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from threading import get_ident
from time import monotonic_ns
from typing import Annotated, Any

from msgspec import Meta

from elastic.tuning.intervals import (
    HANG_SCRIPT_TIMEOUT_S,
    HANG_TIMEOUT_S,
    STEP_SUMS_S,
)

# The first steps of a world allocate, tune and compile: each may take this long.
HANG_FIRST_STEPS_S = 300.0
# A rank is reported to the leader after a part of its budget, but at least this: shorter silences
# occur on busy machines.
HANG_SUSPICION_S = 0.4
# While a checkpoint is read, the CPU time of its threads is read this often, for the hang detector.
BUSY_POLL_S = 1.0

# ----------------------------------------------------------------------------
# The facts about each rank when the job makes no progress: the input of a verdict.
#
# A rank's facts come from its page, which the worker maintains, and
# from the kernel (:mod:`elastic.hangs.kernel`). They are published as JSON, so every field is a
# plain value.


class Phase(IntEnum):
    """The activity of a worker's main thread."""

    STARTING = 0  # in no world yet: imports, data sets, the model
    FORMING = 1  # builds the group of a world, and agrees on the state
    DATA = 2  # waits for a batch
    COMPUTE = 3  # forward and backward pass
    COLLECTIVE = 4  # waits for the other ranks
    OPTIMIZER = 5
    SCRIPT = 6  # the script's own code, outside of forward and backward pass
    EVALUATION = 7
    CHECKPOINT = 8
    NO_WORLD = 9  # waits for its agent to announce a world

    @property
    def label(self) -> str:
        """For sentences: "hangs in …"."""
        return _HANG_LABELS[self]


# For code that runs in every step: before Python 3.12 a member's lookup costs as much as a call.
DATA, COMPUTE, COLLECTIVE = Phase.DATA, Phase.COMPUTE, Phase.COLLECTIVE
OPTIMIZER, SCRIPT, CHECKPOINT = Phase.OPTIMIZER, Phase.SCRIPT, Phase.CHECKPOINT

_HANG_LABELS = {
    Phase.STARTING: "its start",
    Phase.FORMING: "the change of the world",
    Phase.DATA: "the wait for a batch",
    Phase.COMPUTE: "the forward and backward pass",
    Phase.COLLECTIVE: "a collective",
    Phase.OPTIMIZER: "the optimizer's update",
    Phase.SCRIPT: "the script's own code",
    Phase.EVALUATION: "evaluation",
    Phase.CHECKPOINT: "a checkpoint",
    Phase.NO_WORLD: "waiting for its next world",
}


# In a verdict: with 0.6 KiB each, the facts of all ranks of 360 nodes exceed etcd's limit.
MAX_SHOWN_RANKS = 64
IDLE_SHARE = 0.05  # of a core: below it, a process counts as idle


class Flag(IntFlag):
    """Additional state that a worker reports about itself."""

    NONE = 0
    DEBUGGER = 1  # a debugger's prompt is open
    GARBAGE = 2  # a full garbage collection is running
    COMPILING = 4  # torch.compile is running
    ON_STREAM = 8  # collectives are queued on a device, and the host runs ahead of them
    SUBGROUPS = 16  # the script has created process groups
    ON_HOST = 32  # it waits in a collective of the host, which no device runs


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """The kernel's state of a worker's main thread."""

    state: str = "S"  # R running, S asleep, D uninterruptible, T stopped, t traced, Z zombie
    tracer_pid: int = 0
    wait_channel: str = ""  # the kernel function it sleeps in
    file_system: str = ""  # the one that does not answer: "/shared (nfs4)"
    call_target: str = ""  # the object that its system call reads or writes: a path, "a pipe"
    cpu_share: float = 0.0  # of one core, used by the whole process since the last reading
    data_workers: str = ""  # their states, one letter each
    data_worker_waits: str = ""  # the wait channels: "1 in futex_do_wait, 3 in do_poll"


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank, as observed by its agent."""

    rank: int
    node: str  # its name
    local_rank: int
    pid: int
    generation: int
    step: int
    phase: Phase
    outer: Phase  # for a collective: where it was called
    flags: Flag
    progress: int  # changes with every sign of life of the main thread
    # Since the last sign of life, without time in which the machine was suspended.
    quiet_s: float
    # In which neither its main thread nor a data worker has run; measured where a budget depends on
    # it: while it waits for one of the first batches of a world.
    idle_s: float
    collective: int  # sequence number of the last collective that it has begun
    operation: str  # its name
    steps_in_world: int  # committed in this world by this process
    longest_s: float  # the longest recent duration of this phase
    typical_s: float  # its smoothed duration
    longest_step_s: float  # the same for forward and backward pass
    typical_step_s: float
    collective_s: float  # the smoothed duration of collectives
    checkpoint_step: int  # of the last checkpoint that this rank recorded as saved; -1: none
    kernel: KernelFacts

    @property
    def is_traced(self) -> bool:
        """Whether a debugger traces it or has an open prompt."""
        by_kernel = self.kernel.tracer_pid != 0 or self.kernel.state == "t"
        return by_kernel or bool(self.flags & Flag.DEBUGGER)

    @property
    def is_asleep(self) -> bool:
        """Whether its main thread sleeps."""
        return self.kernel.state == "S" and self.kernel.cpu_share <= IDLE_SHARE

    @property
    def call(self) -> tuple[int, int, int, str]:
        """The collective in which it waits: equal for ranks that wait for each other."""
        return self.step, int(self.outer), self.collective, self.operation

    @property
    def name(self) -> str:
        """The rank and its node, for sentences. A process has no rank before its first world."""
        rank = f"rank {self.rank}" if self.rank >= 0 else f"local rank {self.local_rank}"
        return f"{rank} on {self.node}"


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads are at the same place, and the stacks of the first rank."""

    ranks: tuple[int, ...]
    text: str  # the main thread's stack comes last; "": none could be taken


# ----------------------------------------------------------------------------
# How long a rank may show no sign of progress before it counts as hung. Pure.
#
# A budget is the longer one of a lower limit and a multiple of the recent durations of the same
# phase on this rank. No fixed limit is suitable: half a minute is short for a step of a large
# model, and very long for one of 20 ms. The lower limits differ by phase: the script's own code
# outside the forward and backward pass (evaluation on rank 0, an upload) may take minutes without
# any sign of progress, while the time between two batches has been measured hundreds of times.
#
# Waiting ranks have thresholds, too. They are never the culprits while another rank is not in the
# collective; their thresholds determine when their state is published.

# Multiples of a phase's typical and of its longest recent duration. (The longest decays by half in
# about 35 steps: elastic/hangs/page.py.)
_TIMES_TYPICAL = 20.0
_TIMES_LONGEST = 4.0
_TIMES_COLLECTIVE = 10.0
# The first steps of a world allocate, tune and compile: they do not predict later ones.
FIRST_STEPS = 3
# A loader's first batches, and those of each epoch, fill buffers and start workers.
_DATA_FLOORS = 10.0
# A collective in which all ranks wait can be a large one on a slow network.
_LOST_MESSAGE_FLOORS = 4.0
# The part of a budget after which facts are published, so that the leader has them in time.
_SUSPICION = 0.4


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy:
    """Lower limits of budgets, in seconds. ``hang_timeout_s`` is for phases of every step."""

    hang_timeout_s: float = HANG_TIMEOUT_S
    # For the script's own code, evaluation, checkpoints and compilation.
    outside_step_s: float = HANG_SCRIPT_TIMEOUT_S
    first_steps_s: float = HANG_FIRST_STEPS_S


def budget_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long this rank may remain in its state while others wait for it."""
    floor_s = policy.hang_timeout_s
    if facts.flags & (Flag.GARBAGE | Flag.COMPILING):
        return max(policy.outside_step_s, floor_s)
    match facts.phase:
        case Phase.COMPUTE | Phase.OPTIMIZER:
            measured_s = max(floor_s, _own_s(facts), _step_s(facts))
        case Phase.DATA:
            measured_s = max(_DATA_FLOORS * floor_s, _own_s(facts))
            if facts.idle_s >= measured_s:
                return measured_s  # nothing runs that could return a first batch
        case Phase.NO_WORLD:
            return math.inf  # no rank waits for it
        case Phase.COLLECTIVE:
            return lost_message_s(facts, policy)
        case _:
            return max(policy.outside_step_s, floor_s)
    if facts.steps_in_world < FIRST_STEPS:
        return max(policy.first_steps_s, measured_s)
    return measured_s


def mismatch_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long all ranks may wait, each in another collective."""
    return max(
        policy.hang_timeout_s, _TIMES_COLLECTIVE * facts.collective_s, _wait_s(facts, policy)
    )


def lost_message_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long all ranks may wait in one collective."""
    first_s = policy.first_steps_s if facts.steps_in_world < FIRST_STEPS else 0.0
    floor_s = _LOST_MESSAGE_FLOORS * policy.hang_timeout_s
    measured_s = _TIMES_COLLECTIVE * facts.collective_s
    return max(first_s / 10, floor_s, measured_s, _wait_s(facts, policy))


def suspicion_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long this rank may remain in its state before its node publishes it.

    For a waiting rank it depends on the duration of its own steps, which equals the others'.
    """
    if facts.flags & Flag.DEBUGGER:
        return HANG_SUSPICION_S  # a waiting rank is reported at once
    if facts.phase in (Phase.COLLECTIVE, Phase.FORMING) or _may_wait_for_device(facts):
        return _wait_s(facts, policy)
    return max(HANG_SUSPICION_S, _SUSPICION * budget_s(facts, policy))


def _wait_s(facts: RankFacts, policy: BudgetPolicy) -> float:
    """How long a rank normally waits for the others' steps."""
    return max(HANG_SUSPICION_S, _SUSPICION * max(policy.hang_timeout_s, _step_s(facts)))


def _own_s(facts: RankFacts) -> float:
    return max(_TIMES_TYPICAL * facts.typical_s, _TIMES_LONGEST * facts.longest_s)


def _step_s(facts: RankFacts) -> float:
    return max(_TIMES_TYPICAL * facts.typical_step_s, _TIMES_LONGEST * facts.longest_step_s)


def thresholds_s(facts: RankFacts, policy: BudgetPolicy) -> tuple[float, ...]:
    """When to publish, in ascending order: at each of them a verdict may change."""
    at = {suspicion_s(facts, policy), budget_s(facts, policy)}
    if facts.phase is Phase.COLLECTIVE:
        at.add(mismatch_s(facts, policy))
    elif _may_wait_for_device(facts):
        at.add(lost_message_s(facts, policy))
    return tuple(sorted(at))


def _may_wait_for_device(facts: RankFacts) -> bool:
    """Whether the rank may wait in a call that its page does not show, as in ``loss.item()`` or a
    barrier on a device: only the facts of all ranks tell (:mod:`elastic.hangs.verdict`)."""
    return bool(facts.flags & Flag.ON_STREAM) and facts.phase in (
        Phase.COMPUTE,
        Phase.OPTIMIZER,
        Phase.SCRIPT,
        Phase.EVALUATION,
    )


# ----------------------------------------------------------------------------
# The page that a worker keeps and its agent reads: one page of shared memory, no messages.
#
# The agent reads it when the worker is stopped, when it hangs in C code with the interpreter lock
# held, and when its link thread gets no time. A step costs a few microseconds of packing numbers.
#
# The page is a memfd of the worker, so that it is in memory (a mapped file on a hanging disk would
# block the training thread) and disappears with the process. The agent opens it through
# ``/proc/PID/fd``. A write is not atomic: it begins and ends with the same count, and a reader
# that finds two different counts reads again.

SIZE = 4096
NAME = "elastic-progress"
# Words of 64 bits: count, phase, when it began (CLOCK_MONOTONIC, ns), nine that change less often,
# count. They are stored one by one, without a call or a loop in between, so that no other thread
# of the worker takes the interpreter lock in the middle and hangs with it. (Python 3.10 may switch
# threads there; such a page cannot be read.) Packing by struct would cost as much as the rest of a
# phase, with cold caches.
_WORDS = struct.Struct("=13q")
# Kept apart: a flag is not always set by the thread that trains.
_FLAGS = struct.Struct("<i")
_FLAGS_AT = 128
# Written once an epoch: the planned number of steps of the job; 0: unknown.
_PLANNED = struct.Struct("<q")
_PLANNED_AT = 192
_DURATIONS = struct.Struct(f"<{2 * len(Phase)}d")
_DURATIONS_AT = 256
_READS = 5
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The content of a page."""

    count: int  # grows with every sign of life
    generation: int
    step: int
    phase: Phase
    outer: Phase
    rank: int
    operation: int
    collective: int
    steps_in_world: int
    checkpoint_step: int
    collective_s: float
    since_ns: int
    flags: Flag
    longest_s: tuple[float, ...]  # by phase
    typical_s: tuple[float, ...]
    planned_steps: int = 0  # of the whole job; 0: unknown


class Page:
    """The worker's end of the page."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, SIZE)
        # A page that shrinks would end the agent that reads it (SIGBUS).
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self.fd, SIZE)
        self._words = memoryview(self._memory).cast("q")
        self._count = 0

    def write(self, phase: int, since_ns: int) -> None:
        """Record the position of the main thread: a sign of life."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[12] = count

    def write_place(
        self,
        phase: int,
        since_ns: int,
        generation: int,
        step: int,
        outer: int,
        rank: int,
        operation: int,
        collective: int,
        steps_in_world: int,
        checkpoint_step: int,
        collective_ns: int,
    ) -> None:
        """The same, with the words that change less often than the phase."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[3] = generation
        words[4] = step
        words[5] = outer
        words[6] = rank
        words[7] = operation
        words[8] = collective
        words[9] = steps_in_world
        words[10] = checkpoint_step
        words[11] = collective_ns
        words[12] = count

    def write_wait(
        self, phase: int, since_ns: int, outer: int, operation: int, collective: int
    ) -> None:
        """The same when a wait for other ranks begins and nothing else has changed."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[5] = outer
        words[7] = operation
        words[8] = collective
        words[12] = count

    def write_end_of_wait(self, phase: int, since_ns: int, collective_ns: int) -> None:
        """The same when that wait has ended."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[11] = collective_ns
        words[12] = count

    def write_collective(self, collective: int) -> None:
        """Record the number of collectives begun, which is no sign of life."""
        self._words[8] = collective

    def write_flags(self, flags: int) -> None:
        """Record flags, which are no sign of life: an endless loop collects garbage, too."""
        _FLAGS.pack_into(self._memory, _FLAGS_AT, flags)

    def write_planned_steps(self, steps: int) -> None:
        """Record the planned number of steps of the job; 0: unknown."""
        _PLANNED.pack_into(self._memory, _PLANNED_AT, steps)

    def write_durations(self, longest_s: list[float], typical_s: list[float]) -> None:
        """Record the recent durations of the phases."""
        _DURATIONS.pack_into(self._memory, _DURATIONS_AT, *longest_s, *typical_s)

    def close(self) -> None:
        """Release the page."""
        self._words.release()
        self._memory.close()
        os.close(self.fd)


class PageReader:
    """The agent's end of the page of process ``pid``, which has it open as ``fd``."""

    def __init__(self, pid: int, fd: int) -> None:
        """Raises OSError if the descriptor is not a progress page or cannot be opened."""
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise FileNotFoundError(f"{path} is not a progress page")
        mine = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_sealed = fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if os.fstat(mine).st_size != SIZE or not is_sealed:
                raise FileNotFoundError(f"{path} is not sealed at {SIZE} bytes")
            self._memory = mmap.mmap(mine, SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(mine)

    def read(self) -> Reading | None:
        """The content; None if it is inconsistent: a write was interrupted."""
        for _ in range(_READS):
            words = _WORDS.unpack_from(self._memory, 0)
            if words[0] == words[-1]:
                with contextlib.suppress(ValueError):  # not a phase
                    return self._reading(words)
        return None

    def _reading(self, words: tuple[int, ...]) -> Reading:
        count, phase, since_ns, generation, step, outer, rank, operation, *counts, _ = words
        collective, steps_in_world, checkpoint_step, collective_ns = counts
        durations_s = _DURATIONS.unpack_from(self._memory, _DURATIONS_AT)
        (flags,) = _FLAGS.unpack_from(self._memory, _FLAGS_AT)
        (planned_steps,) = _PLANNED.unpack_from(self._memory, _PLANNED_AT)
        return Reading(
            count=count,
            generation=generation,
            step=step,
            phase=Phase(phase),
            outer=Phase(outer),
            rank=rank,
            operation=operation,
            collective=collective,
            steps_in_world=steps_in_world,
            checkpoint_step=checkpoint_step,
            collective_s=collective_ns * 1e-9,
            since_ns=since_ns,
            flags=Flag(flags & sum(Flag)),
            longest_s=durations_s[: len(Phase)],
            typical_s=durations_s[len(Phase) :],
            planned_steps=planned_steps,
        )

    def close(self) -> None:
        """Release the page."""
        self._memory.close()


# ----------------------------------------------------------------------------
# The facts about a rank's steps: their durations, by part.

# Checked when a record or a message is read.
_Seconds = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]


class StepPart(IntEnum):
    """The part of a step on which time was spent."""

    DATA = 0  # waiting for a batch
    COMPUTE = 1  # forward and backward pass, the optimizer's update
    COLLECTIVE = 2  # waiting for other ranks
    CHECKPOINT = 3
    SCRIPT = 4  # the script's own code, evaluation

    @property
    def label(self) -> str:
        """For events and sentences."""
        return _STRAGGLER_LABELS[self]


_STRAGGLER_LABELS = {
    StepPart.DATA: "data wait",
    StepPart.COMPUTE: "compute",
    StepPart.COLLECTIVE: "collective",
    StepPart.CHECKPOINT: "checkpoint",
    StepPart.SCRIPT: "script",
}


@dataclass(frozen=True, kw_only=True)
class StepDurations:
    """The steps of one rank in one window: means per step, without the slowest tenth of them."""

    generation: _Count
    window: _Count  # grows with every window of the process
    steps: _Positive  # over which the means are taken
    samples: _Count  # of this rank in those steps; 0: not known, or it had none
    data_s: _Seconds
    compute_s: _Seconds
    collective_s: _Seconds
    checkpoint_s: _Seconds
    script_s: _Seconds

    @property
    def own_s(self) -> float:
        """The time of a step that this rank needs before the others can continue.

        Excludes the wait for others, and parts that are legitimately long on one rank: checkpoints,
        and the script's own code, which evaluates and logs on rank 0.
        """
        return self.data_s + self.compute_s

    @property
    def step_s(self) -> float:
        """The duration of a step."""
        return self.own_s + self.collective_s + self.checkpoint_s + self.script_s


@dataclass(frozen=True, kw_only=True)
class RankStepTimes:
    """The step times of one worker of a node."""

    local_rank: _Count
    times: StepDurations


# ----------------------------------------------------------------------------
# Measures a worker's step times, window by window.
#
# The training thread adds each step when it commits, which costs less than a microsecond; the
# link's thread takes the last window. A window has a length in seconds and a minimum number of
# steps, so that a single step has little influence: the slowest tenth, with garbage collections,
# compilations or pauses of the machine, is excluded from the means.

MIN_STEPS = 8  # of a window
# More steps than these add no information, and would have to be kept and sorted.
MAX_STEPS = 1000
_SLOWEST_TENTH = 10

_Step = tuple[float, int, tuple[float, ...]]  # own time, samples, time by part


class StepWindows:
    """One per process. It measures nothing before :meth:`measure`."""

    def __init__(self) -> None:
        self._window_ns = 0
        self._generation = 0
        self._began_ns = 0
        self._number = 0
        self._steps: list[_Step] = []
        self._closed: deque[StepDurations] = deque(maxlen=1)

    def measure(self, window_s: float) -> None:
        """Windows are this long from now on; 0: nothing is measured. From any thread."""
        self._window_ns = int(window_s * 1e9)

    def take(self) -> StepDurations | None:
        """The last window that has ended and was not taken. From any thread."""
        try:
            return self._closed.popleft()
        except IndexError:
            return None

    def restart(self, generation: int, now_ns: int) -> None:
        """Another world, or one of its first steps: earlier measurements are discarded."""
        self._generation, self._began_ns = generation, now_ns
        self._steps.clear()

    def add(self, parts_s: Sequence[float], samples: int, now_ns: int) -> None:
        """A step has committed. ``parts_s`` by :class:`StepPart`."""
        if not self._window_ns:
            return
        steps = self._steps
        if len(steps) < MAX_STEPS:
            steps.append((parts_s[0] + parts_s[1], samples, tuple(parts_s)))
        if now_ns - self._began_ns >= self._window_ns and len(steps) >= MIN_STEPS:
            self._number += 1
            self._closed.append(summarize(steps, self._generation, self._number))
            self.restart(self._generation, now_ns)


def summarize(steps: Sequence[_Step], generation: int, window: int) -> StepDurations:
    """The means of the steps, without the slowest tenth, at least one of them."""
    slowest = -(-len(steps) // _SLOWEST_TENTH)
    counted = sorted(steps)[: len(steps) - slowest]
    sums = [sum(part) for part in zip(*(parts for _, _, parts in counted), strict=True)]
    means = [total / len(counted) for total in sums]
    return StepDurations(
        generation=generation,
        window=window,
        steps=len(counted),
        samples=sum(samples for _, samples, _ in counted),
        data_s=means[StepPart.DATA],
        compute_s=means[StepPart.COMPUTE],
        collective_s=means[StepPart.COLLECTIVE],
        checkpoint_s=means[StepPart.CHECKPOINT],
        script_s=means[StepPart.SCRIPT],
    )


step_windows = StepWindows()
"""The windows of this process."""


# ----------------------------------------------------------------------------
# Sums up the phases that a worker's main thread has recorded: their durations, by phase and by
# step.
#
# The thread records pairs of numbers: a phase and its nanoseconds, or one of the marks below and a
# number. It sums them up periodically, not in each step: code that runs once per step runs from
# cold caches, which costs ten times as much as the same code in a loop.

COMMITTED = -1  # a step was; the number: when, in ns of the monotonic clock
SAMPLES = -2  # that many are this rank's from now on
OWN_LOADER = -3  # in the DATA that ends next the script reads a data set beside the training one

# Of the longest that a phase took, the fraction kept after each step: half after 35.
_KEPT_PER_STEP = 0.98
_SMOOTHING_PHASE_SUMS = 0.1

# The part of a step's time to which a phase belongs.
_PARTS = {
    Phase.DATA: StepPart.DATA,
    Phase.COMPUTE: StepPart.COMPUTE,
    Phase.OPTIMIZER: StepPart.COMPUTE,
    Phase.COLLECTIVE: StepPart.COLLECTIVE,
    Phase.CHECKPOINT: StepPart.CHECKPOINT,
}
_NO_PARTS_S = [0.0] * len(StepPart)


class _PhaseSum:
    """The durations of one phase, in seconds."""

    __slots__ = ("committed_s", "longest_s", "part", "peak_s", "present_s", "typical_s")

    def __init__(self, phase: Phase) -> None:
        self.part = int(_PARTS.get(phase, StepPart.SCRIPT))
        self.committed_s = 0.0  # the total when the last step was committed
        self.present_s = 0.0  # since then
        self.forget_durations()

    def forget_durations(self) -> None:
        self.longest_s = 0.0  # when the last step was committed
        self.peak_s = 0.0  # the same until now
        self.typical_s = 0.0


class PhaseSums:
    """The durations of the phases: in total, recently, and in the current step."""

    def __init__(self) -> None:
        self._of = tuple(map(_PhaseSum, Phase))
        self.committed_ns = 0  # when the last step was committed
        self._samples = 0  # of this rank in the current step
        self._is_own_loader = False
        self._own_loader_s = 0.0  # of the current step's DATA

    @property
    def total_s(self) -> list[float]:
        """The total time of each phase."""
        return [one.committed_s + one.present_s for one in self._of]

    @property
    def committed_s(self) -> list[float]:
        """The same when the last step was committed."""
        return [one.committed_s for one in self._of]

    @property
    def longest_s(self) -> list[float]:
        """The longest recent duration of each phase, when the last step was committed."""
        return [one.longest_s for one in self._of]

    @property
    def typical_s(self) -> list[float]:
        """The smoothed duration of each phase."""
        return [one.typical_s for one in self._of]

    def forget_durations(self) -> None:
        """Forget recent durations, which do not predict later ones."""
        for one in self._of:
            one.forget_durations()

    def add(self, noted: Sequence[int], windows: StepWindows | None) -> bool:
        """Sum up the records, in their order; returns whether a step was committed.

        ``windows``: receives the times of steps.
        """
        of, is_own_loader, is_committed = self._of, self._is_own_loader, False
        pairs = iter(noted)
        # One loop without calls: a call for each phase would double its cost.
        for what, number in zip(pairs, pairs, strict=True):
            if what >= 0:
                one, took_s = of[what], number * 1e-9
                one.present_s += took_s
                one.typical_s += _SMOOTHING_PHASE_SUMS * (took_s - one.typical_s)
                if took_s > one.peak_s:
                    one.peak_s = took_s
                if is_own_loader and what == DATA:
                    is_own_loader = False
                    self._own_loader_s += took_s
            elif what == COMMITTED:
                is_committed = True
                self._commit(number, windows)
            elif what == SAMPLES:
                self._samples = number
            else:
                is_own_loader = True
        self._is_own_loader = is_own_loader
        return is_committed

    def _commit(self, at_ns: int, windows: StepWindows | None) -> None:
        parts_s = _NO_PARTS_S.copy()
        for one in self._of:
            if one.present_s or one.peak_s:  # few phases are in use
                parts_s[one.part] += one.present_s
                one.committed_s += one.present_s
                one.present_s = 0.0
                one.longest_s = one.peak_s
                one.peak_s *= _KEPT_PER_STEP
        self.committed_ns = at_ns
        if self._own_loader_s:
            parts_s[StepPart.DATA] -= self._own_loader_s
            parts_s[StepPart.SCRIPT] += self._own_loader_s
            self._own_loader_s = 0.0
        if windows is not None:
            windows.add(parts_s, self._samples, at_ns)


# ----------------------------------------------------------------------------
# The contents of a worker's page, and the hooks that determine them.
#
# ``phases`` is the recorder of this process. Every method may be called before
# :meth:`PhaseRecorder.start`, in processes without an agent, in forked children and on other
# threads than the one that called it: there it has no effect.

_SMOOTHING_PHASES = 10  # of collectives' durations: the newest counts a tenth
_OLDEST_GENERATION = 2  # a full garbage collection: younger ones take microseconds
_MAX_NOTED = 1024  # numbers

# By number, so that the page holds no text. c10d's OpType (torch/csrc/distributed/c10d/Work.hpp).
OPERATIONS = (
    "broadcast",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "all_gather",
    "_all_gather_base",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all_base",
    "all_to_all",
    "send",
    "recv",
    "recv_any_source",
    "barrier",
    "_reduce_scatter_base",
    "coalesced",
    "all_reduce_sparse",
    "reduce_scatter_tensor_coalesced",
)


# On the page, an operation of the host is this and its number, so that a wait takes one write.
_HOST = 1 << 8


def on_host(operation: int) -> int:
    """The number on the page of an operation that the host waits for, and no device runs."""
    return _HOST | operation & (_HOST - 1)


def is_on_host(number: int) -> bool:
    """Whether a number on the page is that of an operation of the host."""
    return number >= _HOST


def operation_name(number: int) -> str:
    """The name of an operation, for sentences."""
    number = number & (_HOST - 1) if is_on_host(number) else number
    return OPERATIONS[number] if 0 <= number < len(OPERATIONS) else "a collective"


class PhaseRecorder:
    """Records the activity of this process's main thread. One per process: :data:`phases`."""

    def __init__(self, windows: StepWindows = step_windows) -> None:
        self._windows = windows
        self._noted: list[int] = []  # since the last sum; see elastic/hangs/page.py
        self._sum_at_ns = 0  # when to sum it up
        self._page: Page | None = None
        self._thread = 0  # the training thread
        self._generation = 0
        self._step = 0
        self._samples = 0  # of this rank in the step
        self._phase = Phase.STARTING
        self._outer = Phase.STARTING
        self._rank = -1
        self._operation = -1
        self._collective = 0
        self._steps_in_world = 0
        self._checkpoint_step = -1
        self.planned_steps = 0  # of the whole job; 0: unknown
        self._collective_ns = 0
        self._is_moved = True  # the page's contents other than the phase have changed
        self._since_ns = monotonic_ns()
        self._flags = 0
        self._sums = PhaseSums()
        self._sees_compilation = False

    # -- the beginning ------------------------------------------------------------------------

    def start(self) -> int:
        """Create the page and install the hooks; returns the page's descriptor, for the agent.

        Raises OSError where the kernel gives no memory.
        """
        if self._page is None:
            self._page = Page()
            self._watch_thread()
            gc.callbacks.append(self._on_garbage)
            _watch_debugger(self.set_flag)
            self._move(self._page, self._phase, self._since_ns)
            self._page.write_planned_steps(self.planned_steps)
        return self._page.fd

    def account(self) -> None:
        """Start summing this thread's time in each phase, with or without a page."""
        if self._page is None:
            self._watch_thread()

    def _watch_thread(self) -> None:
        if not self._thread:
            os.register_at_fork(after_in_child=self._stop)
        self._thread = get_ident()

    def _stop(self) -> None:
        """In a forked child: the page is its parent's."""
        self._page, self._thread = None, 0

    def seconds(self) -> list[float]:
        """The time in each phase until now. Call it on the thread of :meth:`account`."""
        self._sum_up()
        total_s = self._sums.total_s
        total_s[self._phase] += (monotonic_ns() - self._since_ns) * 1e-9
        return total_s

    def at_commit(self) -> tuple[float, list[float]]:
        """When the last step was committed, on the monotonic clock, and :meth:`seconds` then."""
        self._sum_up()
        return self._sums.committed_ns * 1e-9, self._sums.committed_s

    @property
    def is_on(self) -> bool:
        """Whether an agent reads the page."""
        return self._page is not None

    # -- phases of the main thread ------------------------------------------------------------

    def enter(self, phase: Phase) -> Phase:
        """The main thread is in ``phase`` from now on; returns the previous one.

        It always runs with cold caches, so it only records: sums are computed periodically.
        """
        before = self._phase
        if get_ident() != self._thread:
            return before
        now_ns = monotonic_ns()
        noted = self._noted
        noted += (before, now_ns - self._since_ns)
        self._phase, self._since_ns = phase, now_ns
        if self._page is not None:
            if self._is_moved:
                self._move(self._page, phase, now_ns)
            else:
                self._page.write(phase, now_ns)
        if len(noted) > _MAX_NOTED:
            self._sum_up()
        return before

    def enter_batch(self) -> Phase:
        """A batch is requested from a ``DataLoader`` of the process; returns the previous phase.

        If this library distributes the training data, a loader that is read elsewhere belongs to
        the script, for example to an evaluation. It does not make a rank a straggler.
        """
        before = self.enter(DATA)
        is_of_training = before is DATA or not self._samples
        if not is_of_training and get_ident() == self._thread:
            self._noted += (OWN_LOADER, 0)
        return before

    def begin_step(self, number: int, samples: int = 0) -> None:
        """The script receives a step. Its work before the forward pass is its own code: an
        evaluation on rank 0 or a plot may take any time.

        ``samples``: of this rank; 0: the script distributes the data itself.
        """
        if number != self._step:
            self._step, self._is_moved = number, True
        if samples != self._samples:
            self._samples = samples
            self._noted += (SAMPLES, samples)
        self.enter(SCRIPT)
        if self._steps_in_world <= FIRST_STEPS:
            self._watch_compilation()

    def committed(self, step: int) -> None:
        """A step was committed; ``step`` is their number."""
        self._step = step
        self._steps_in_world = steps = self._steps_in_world + 1
        self._is_moved = True
        self.enter(SCRIPT)
        if get_ident() != self._thread:
            return
        now_ns, noted = self._since_ns, self._noted
        noted += (COMMITTED, now_ns)
        if steps <= FIRST_STEPS:
            self._commit_early()
        elif now_ns >= self._sum_at_ns:
            self._sum_up()
            self._watch_compilation()

    def _commit_early(self) -> None:
        """One of the first steps in a world, which take longer than later ones."""
        self._sum_up()
        self._windows.restart(self._generation, self._since_ns)
        if self._steps_in_world == FIRST_STEPS:
            self._sums.forget_durations()
            self._write_durations()

    def _sum_up(self) -> None:
        noted, self._noted = self._noted, []
        self._sum_at_ns = self._since_ns + int(STEP_SUMS_S * 1e9)
        is_measured = self._page is not None and self._steps_in_world > FIRST_STEPS
        if self._sums.add(noted, self._windows if is_measured else None):
            self._write_durations()

    def _write_durations(self) -> None:
        if self._page is not None:
            self._page.write_durations(self._sums.longest_s, self._sums.typical_s)

    def enter_generation(self, generation: int) -> None:
        """Another world was entered: its group is built next."""
        self._sum_up()
        self._sums.forget_durations()
        self._generation = generation
        self._steps_in_world = 0
        self._collective_ns = 0
        self._is_moved = True
        self.enter(Phase.FORMING)

    def progressed(self) -> None:
        """A sign of life, from another thread while the main thread changes no phase
        . For the agent, the phase begins again; the sums are as before.
        """
        if self._page is not None:
            self._page.write(self._phase, monotonic_ns())

    def begin_world(self, rank: int) -> None:
        """The state is agreed: training continues."""
        self._rank, self._is_moved = rank, True
        self.enter(Phase.SCRIPT)

    def saved(self, step: int) -> None:
        """A checkpoint of that step is complete, as reported to this rank."""
        self._checkpoint_step, self._is_moved = step, True

    def plan_steps(self, steps: int) -> None:
        """Set the planned number of steps of the entire job; 0: unknown."""
        if steps == self.planned_steps:
            return
        self.planned_steps = steps
        if self._page is not None:
            self._page.write_planned_steps(steps)

    # -- collectives --------------------------------------------------------------------------

    def queued(self, collective: int) -> None:
        """The number of collectives begun; if they are queued on a device, the host does not
        wait."""
        self._collective, self._is_moved = collective, True

    def begun(self, collective: int) -> None:
        """The same from any thread, on behalf of the main thread, which may be blocked: it does not
        count as progress."""
        self._collective = collective
        if self._page is not None:
            self._page.write_collective(collective)

    def begin_wait(self, collective: int, operation: int) -> Phase:
        """The main thread waits for other ranks; returns the argument of :meth:`end_wait`."""
        before = self._phase
        page = self._page
        if page is None or get_ident() != self._thread:
            return before
        now_ns = monotonic_ns()
        self._noted += (before, now_ns - self._since_ns)
        self._phase, self._since_ns = COLLECTIVE, now_ns
        self._collective, self._operation = collective, operation
        if before is not COLLECTIVE:
            self._outer = before
        if self._is_moved:
            self._move(page, COLLECTIVE, now_ns)
        else:
            page.write_wait(COLLECTIVE, now_ns, self._outer, operation, collective)
        return before

    def end_wait(self, before: Phase) -> None:
        """The wait has ended, successfully or not."""
        page = self._page
        if page is None or get_ident() != self._thread:
            return
        now_ns, noted = monotonic_ns(), self._noted
        took_ns = now_ns - self._since_ns
        noted += (self._phase, took_ns)
        self._phase, self._since_ns = before, now_ns
        self._collective_ns += (took_ns - self._collective_ns) // _SMOOTHING_PHASES
        if self._is_moved:
            self._move(page, before, now_ns)
        else:
            page.write_end_of_wait(before, now_ns, self._collective_ns)
        if len(noted) > _MAX_NOTED:
            self._sum_up()

    # -- flags --------------------------------------------------------------------------------

    def set_flag(self, flag: int, is_set: bool) -> None:
        """Set or clear a flag, from any thread. ``flag``: a :class:`Flag`, or its number."""
        flags = self._flags | flag if is_set else self._flags & ~flag
        if flags == self._flags:
            return
        self._flags = flags
        if self._page is not None:
            self._page.write_flags(self._flags)

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == _OLDEST_GENERATION:
            self.set_flag(Flag.GARBAGE, phase == "start")

    def _watch_compilation(self) -> None:
        """Register with torch.compile once it is imported: importing it here takes a second."""
        if self._sees_compilation or self._page is None:
            return
        module = sys.modules.get("torch._dynamo.callback")
        if module is None:
            return
        self._sees_compilation = True
        handler = getattr(module, "callback_handler", None)
        for name, is_begin in (("register_start_callback", True), ("register_end_callback", False)):
            register = getattr(handler, name, None)
            if register is not None:
                register(self._on_compilation(is_begin))

    def _on_compilation(self, is_begin: bool) -> Callable[..., None]:
        def compiles(*args: Any) -> None:
            self.set_flag(Flag.COMPILING, is_begin)

        return compiles

    def _move(self, page: Page, phase: Phase, since_ns: int) -> None:
        self._is_moved = False
        page.write_place(
            phase,
            since_ns,
            self._generation,
            self._step,
            self._outer,
            self._rank,
            self._operation,
            self._collective,
            self._steps_in_world,
            self._checkpoint_step,
            self._collective_ns,
        )


phases = PhaseRecorder()
"""The recorder of this process."""


def _watch_debugger(set_flag: Callable[[int, bool], None]) -> None:
    """Detect open prompts: ``breakpoint()``, ``pdb.set_trace()``, IPython's ipdb and
    ``torch.distributed.breakpoint()`` all call ``Pdb.interaction``."""
    import pdb

    at_prompt = pdb.Pdb.interaction

    def interaction(self: pdb.Pdb, *args: Any, **kwargs: Any) -> Any:
        set_flag(Flag.DEBUGGER, True)
        try:
            return at_prompt(self, *args, **kwargs)
        finally:
            set_flag(Flag.DEBUGGER, False)

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
    if "pydevd" in sys.modules:  # an editor's debugger pauses threads without this call
        set_flag(Flag.DEBUGGER, True)


# ----------------------------------------------------------------------------
# Signs of life of a long call without steps: a checkpoint that is read and verified.
#
# Its duration grows with its size, so no time limit suits it. What tells a slow call from a hung
# one is whether its threads run: a read that returns bytes takes CPU time to copy them, and a hash
# more. A thread that is blocked takes none.

THREAD_NAME = "elastic-busy"


@contextlib.contextmanager
def busy(helpers: str = "", progressed: Callable[[], object] = phases.progressed) -> Iterator[None]:
    """While the block runs on this thread, report progress whenever this thread, or one whose name
    begins with ``helpers``, has used CPU time. The block enters no other phase."""
    ended = threading.Event()
    watcher = threading.Thread(
        target=_watch,
        args=(threading.get_native_id(), helpers, progressed, ended),
        name=THREAD_NAME,
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(
    caller: int, helpers: str, progressed: Callable[[], object], ended: threading.Event
) -> None:
    before: dict[int, int] = {}
    while not ended.wait(BUSY_POLL_S):
        threads = {caller}
        if helpers:
            threads |= {
                thread.native_id
                for thread in threading.enumerate()
                if thread.name.startswith(helpers) and thread.native_id is not None
            }
        used = {thread: cpu_ticks(thread) for thread in threads}
        if any(ticks > before.get(thread, 0) for thread, ticks in used.items()):
            progressed()
        before = used


def cpu_ticks(native_id: int) -> int:
    """The CPU time of a thread of this process, in clock ticks (10 ms); 0 if it has ended.

    Not by ``time.pthread_getcpuclockid``, whose behaviour is undefined for a thread that has ended.
    """
    try:
        with open(f"/proc/{os.getpid()}/task/{native_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may contain anything
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # utime, stime: fields 14 and 15 of proc(5)
