"""Everything that can happen, as frozen dataclasses: what journals hold and logs say.

An event says what happened; who and when (node, rank, generation, wall and monotonic time) is
added by :mod:`elastic.telemetry.journal` when it is written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base. The class name, in kebab case, is the event's name in the journal."""


@dataclass(frozen=True, kw_only=True)
class NodeArrived(Event):
    """This node waits for a world; ``failure`` and ``exit_code`` are those of its worker, if it
    is because one has failed."""

    after_generation: int
    failure: str | None
    exit_code: int | None


@dataclass(frozen=True, kw_only=True)
class WorldFormed(Event):
    """A world was agreed."""

    generation: int
    nodes: tuple[str, ...]
    size: int
    state: str
    mode: str
    cause: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorldEntered(Event):
    """This node hands its workers the world."""

    generation: int
    first_rank: int
    size: int
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerDied(Event):
    """A worker process is gone before its time."""

    pid: int
    local_rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerStuck(Event):
    """A worker ends itself: a call that nothing can interrupt has not returned in time."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class HangFound(Event):
    """A world does not go on; who keeps it, and what this node does about it."""

    generation: int
    action: str
    kind: str
    ranks: tuple[int, ...]  # the culprits
    confidence: str
    reason: str
    report: str  # the path of the hang report; "": none was written


@dataclass(frozen=True, kw_only=True)
class HangOver(Event):
    """A rank that was about to be ended as hung goes on."""

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StragglerFound(Event):
    """A rank holds the others up: its own work takes longer than theirs. Times are of a step."""

    generation: int
    rank: int
    node: str
    cause: str  # data wait or compute
    factor: float  # its own time per sample, as a multiple of the typical one
    z_score: float
    windows: int  # in a row
    data_s: float
    compute_s: float
    collective_s: float
    checkpoint_s: float
    script_s: float
    typical_data_s: float
    typical_compute_s: float
    lag_s: float  # what the others wait for
    reason: str


@dataclass(frozen=True, kw_only=True)
class StragglerRecovered(Event):
    """A rank that was a straggler keeps up with the others again."""

    generation: int
    rank: int
    node: str
    factor: float


@dataclass(frozen=True, kw_only=True)
class FailureJudged(Event):
    """The leader's verdict on the failure that broke a world, and the text that it rests on."""

    generation: int
    node: str
    action: str  # restart, exclude-node or stop
    rule: str
    confidence: str
    reason: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class WorkerTrouble(Event):
    """A worker's collective failed: perhaps a peer has died."""

    generation: int
    local_rank: int
    error: str


@dataclass(frozen=True, kw_only=True)
class LeaderChanged(Event):
    """Another node leads (or none does)."""

    leader: str | None


@dataclass(frozen=True, kw_only=True)
class NodeSuspected(Event):
    """A member gave reason to doubt that it lives."""

    suspect: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """A member is gone."""

    lost: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeFound(Event):
    """A node that was given up as dead answers after all."""

    found: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """The leader waits before it forms the next world, and for what."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class StoreProblem(Event):
    """The store failed a call, cut a watch, or was wiped; what is done about it."""

    error: str
    consequence: str


@dataclass(frozen=True, kw_only=True)
class LeaseLost(Event):
    """The store says that this node's lease is gone."""

    consequence: str


@dataclass(frozen=True, kw_only=True)
class NodeLeaving(Event):
    """This node was told to leave."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkersTuned(Event):
    """The network profile and the interface of the workers that are started next."""

    profile: str
    reason: str
    interface: str | None
    interface_reason: str | None


@dataclass(frozen=True, kw_only=True)
class HealthServed(Event):
    """This agent answers /livez and /readyz."""

    port: int


@dataclass(frozen=True, kw_only=True)
class NodeParked(Event):
    """The job is over; this agent stays, without workers, until SIGTERM."""

    outcome: str
    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """The job is over."""

    outcome: str
    reason: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class FailureTimelineWritten(Event):
    """The job has failed: a page about what broke when, and what was done."""

    timeline: str
    report: str  # the path of the same page; "": it could not be written
    problem: str  # why not


@dataclass(frozen=True, kw_only=True)
class StateRestored(Event):
    """A worker got its state back (or started fresh)."""

    source: str  # "initial" | checkpoint name
    step: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class WorldJoined(Event):
    """A worker is in a new world without a restart, and agrees with it on the state."""

    generation: int
    rank: int
    size: int
    step: int
    source: int | None  # the rank whose state it is; None: a checkpoint, or the initial state
    replay: tuple[str, ...]  # optimizers that had stepped, masked when the step is done again
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class StateReceived(Event):
    """A worker got its weights from another one."""

    source: int
    step: int
    bytes: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class StateSent(Event):
    """A worker gave its weights to others."""

    receivers: tuple[int, ...]
    step: int
    bytes: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class WorldFault(Event):
    """A worker's step ended because the world did."""

    generation: int
    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """A worker goes on after a change of the world."""

    generation: int
    step: int
    duration_s: float  # from the fault, or the switch, to the training function's next start
    leave_s: float  # of it: taking the old group down
    wait_s: float  # waiting for the next world
    build_s: float  # building its group
    agree_s: float  # agreeing on the state, and sending it to who lacks it
    wrap_s: float  # initialising DDP, and the rest


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was committed, as seen by this rank."""

    name: str
    step: int
    duration_s: float  # from the step's boundary until the checkpoint stood
    stall_s: float  # of it: what training waited for
    bytes: int  # that this rank wrote


@dataclass(frozen=True, kw_only=True)
class WorkerReplaced(Event):
    """A process was started in the place of a dead worker; its siblings keep theirs."""

    local_rank: int
    pid: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint could not be saved or used; training goes on with the others."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PartNotCopied(Event):
    """This node's part of a checkpoint in memory has no copy on another node."""

    name: str
    peer: str
    reason: str
