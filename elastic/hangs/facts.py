"""The facts about each rank when the job makes no progress: the input of a verdict.

A rank's facts come from its page, which the worker maintains (:mod:`elastic.hangs.page`), and from
the kernel (:mod:`elastic.hangs.kernel`). They are published as JSON, so every field is a plain
value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag


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
        return _LABELS[self]


# For code that runs in every step: before Python 3.12 a member's lookup costs as much as a call.
DATA, COMPUTE, COLLECTIVE = Phase.DATA, Phase.COMPUTE, Phase.COLLECTIVE
OPTIMIZER, SCRIPT, CHECKPOINT = Phase.OPTIMIZER, Phase.SCRIPT, Phase.CHECKPOINT

_LABELS = {
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
