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
class JournalOpened(Event):
    """A process begins its journal, or goes on in a new file of it."""

    schema: int  # version of the lines that follow
    role: str  # "agent" or "worker"
    run_id: str | None  # the name of the job; null: not known
    pid: int  # of the process
    host: str  # the machine's name
    boot_id: str  # of the machine: its processes share a monotonic clock; "": not known
    library: str  # version of torch-elastic-harness; "": not known


@dataclass(frozen=True, kw_only=True)
class JournalClosed(Event):
    """The last line of a process that ended in order."""


@dataclass(frozen=True, kw_only=True)
class NodeArrived(Event):
    """This node waits for a world; ``failure`` and ``exit_code`` are those of its worker, if it
    is because one has failed."""

    after_generation: int  # that its workers have left; 0: none
    failure: str | None  # what its workers ended with; null: no failure
    exit_code: int | None  # theirs


@dataclass(frozen=True, kw_only=True)
class WorldFormed(Event):
    """A world was agreed."""

    generation: int  # of the new world
    nodes: tuple[str, ...]  # names, in the order of ranks
    size: int  # number of workers
    state: str  # "active"; "paused": below the minimum of nodes
    mode: str  # "restart" or "in-process": how workers enter it
    cause: str  # first, lost, left, failure, joined, paused, resumed or takeover
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class WorldEntered(Event):
    """This node hands its workers the world."""

    generation: int  # of the world
    first_rank: int  # global rank of this node's local rank 0
    size: int  # number of workers in the world
    waited_s: float  # since this node arrived


@dataclass(frozen=True, kw_only=True)
class WorkersStarting(Event):
    """torchrun starts worker processes on this node: all of them, or one in a dead one's place."""


@dataclass(frozen=True, kw_only=True)
class WorkerDied(Event):
    """A worker process is gone before its time."""

    pid: int  # of the worker
    local_rank: int  # of the worker
    reason: str  # a sentence, or its last traceback


@dataclass(frozen=True, kw_only=True)
class WorkerStuck(Event):
    """A worker ends itself: a call that nothing can interrupt has not returned in time."""

    reason: str  # which call, and what was to follow


@dataclass(frozen=True, kw_only=True)
class HangFound(Event):
    """A world does not go on; who keeps it, and what this node does about it."""

    generation: int  # of the world
    action: str  # what this node does
    kind: str  # of hang: docs/explanation/hangs.md
    ranks: tuple[int, ...]  # the culprits
    confidence: str  # in the verdict
    reason: str  # a sentence
    report: str  # the path of the hang report; "": none was written


@dataclass(frozen=True, kw_only=True)
class HangOver(Event):
    """A rank that was about to be ended as hung goes on."""

    hung_rank: int  # the rank
    reason: str  # why


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

    generation: int  # of the world that broke
    failed: str  # the node's name
    action: str  # restart, exclude-node or stop
    rule: str  # its name: docs/reference/failures.md
    confidence: str  # in the verdict
    reason: str  # a sentence
    evidence: str  # the text that the rule has matched


@dataclass(frozen=True, kw_only=True)
class WorkerTrouble(Event):
    """A worker's collective failed: perhaps a peer has died."""

    generation: int  # of the world
    local_rank: int  # of the worker
    error: str  # what was raised


@dataclass(frozen=True, kw_only=True)
class LeaderChanged(Event):
    """Another node leads (or none does)."""

    leader: str | None  # node id; null: none


@dataclass(frozen=True, kw_only=True)
class NodeSuspected(Event):
    """A member gave reason to doubt that it lives."""

    suspect: str  # name of the member
    reason: str  # what gave the doubt


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """A member is gone."""

    lost: str  # name of the member
    reason: str  # the proof


@dataclass(frozen=True, kw_only=True)
class NodeFound(Event):
    """A node that was given up as dead answers after all."""

    found: str  # name of the node
    reason: str  # how it was noticed


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """The leader waits before it forms the next world, and for what."""

    reason: str  # for what, a sentence


@dataclass(frozen=True, kw_only=True)
class StoreProblem(Event):
    """The store failed a call, cut a watch, or was wiped; what is done about it."""

    error: str  # "" where the problem is over
    consequence: str  # what is done about it


@dataclass(frozen=True, kw_only=True)
class LeaseLost(Event):
    """The store says that this node's lease is gone."""

    consequence: str  # what is done about it


@dataclass(frozen=True, kw_only=True)
class NodeLeaving(Event):
    """This node was told to leave."""

    reason: str  # who told it


@dataclass(frozen=True, kw_only=True)
class WorkersTuned(Event):
    """The network profile and the interface of the workers that are started next."""

    profile: str  # infiniband, roce, ethernet, cloud or single-node
    reason: str  # why this profile
    interface: str | None  # for NCCL and gloo; null: their own choice
    interface_reason: str | None  # why this interface


@dataclass(frozen=True, kw_only=True)
class HealthServed(Event):
    """This agent answers /livez and /readyz."""

    port: int  # TCP


@dataclass(frozen=True, kw_only=True)
class NodeParked(Event):
    """The job is over; this agent stays, without workers, until SIGTERM."""

    outcome: str  # "success" or "failure"
    exit_code: int  # the job's
    reason: str  # how the job ended


@dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """The job is over."""

    outcome: str  # "success" or "failure"
    reason: str  # a sentence
    exit_code: int  # the job's


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
    step: int  # committed in the state
    duration_s: float  # reading and verifying it


@dataclass(frozen=True, kw_only=True)
class WorldJoined(Event):
    """A worker is in a new world without a restart, and agrees with it on the state."""

    generation: int  # of the new world
    rank: int  # in it
    size: int  # number of workers
    step: int  # committed in the state
    source: int | None  # the rank whose state it is; None: a checkpoint, or the initial state
    replay: tuple[str, ...]  # optimizers that had stepped, masked when the step is done again
    duration_s: float  # to agree, transfers included


@dataclass(frozen=True, kw_only=True)
class StateReceived(Event):
    """A worker got its weights from another one."""

    source: int  # rank that sent them
    step: int  # committed in the state
    bytes: int  # received
    duration_s: float  # of the transfer


@dataclass(frozen=True, kw_only=True)
class StateSent(Event):
    """A worker gave its weights to others."""

    receivers: tuple[int, ...]  # ranks
    step: int  # committed in the state
    bytes: int  # sent
    duration_s: float  # of the transfer


@dataclass(frozen=True, kw_only=True)
class WorldFault(Event):
    """A worker's step ended because the world did."""

    generation: int  # of the world that is over
    step: int  # committed before the fault
    error: str  # what was raised


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """A worker goes on after a change of the world."""

    generation: int  # of the new world
    step: int  # committed in the state
    duration_s: float  # from the fault, or the switch, to the training function's next start
    leave_s: float  # of it: taking the old group down
    wait_s: float  # waiting for the next world
    build_s: float  # building its group
    agree_s: float  # agreeing on the state, and sending it to who lacks it
    paused_s: float  # in worlds below the job's minimum of nodes, where nothing is trained
    wrap_s: float  # initialising DDP, and the rest


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was committed, as seen by this rank."""

    name: str  # of the checkpoint
    step: int  # that it holds
    duration_s: float  # from the step's boundary until the checkpoint stood
    stall_s: float  # of it: what training waited for
    bytes: int  # that this rank wrote


@dataclass(frozen=True, kw_only=True)
class WorkerReplaced(Event):
    """A process was started in the place of a dead worker; its siblings keep theirs."""

    local_rank: int  # of both
    pid: int  # of the new process


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint could not be saved or used; training goes on with the others."""

    name: str  # of the checkpoint, or its step
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class PartNotCopied(Event):
    """This node's part of a checkpoint in memory has no copy on another node."""

    name: str  # of the checkpoint
    peer: str  # the node that should have it
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class StepTimes(Event):
    """Where a rank's time has gone since its last such event, or since its world began.

    The parts add up to ``duration_s``. Written every STEP_TIMES_S seconds, after the first step of
    a world, and when a world ends.
    """

    generation: int  # of the world
    step: int  # committed by now
    steps: int  # of them in this window
    duration_s: float  # the window ends when the event is written
    productive_s: float  # in steps that were committed, less what follows
    data_s: float  # waiting for batches
    checkpoint_s: float  # training stood still for checkpoints
    evaluation_s: float  # forward passes in eval mode
    open_s: float  # since the last commit, less what counts above: a step that has not ended
    collective_s: float  # of productive_s: waiting for other ranks
    ended: str  # why the window ends: "due", "first-step", "fault", "change" or "close"


@dataclass(frozen=True, kw_only=True)
class RunClosed(Event):
    """A worker's run is closed: after training, or with an error of the script."""

    clean: bool  # whether training was complete
    error: str  # of the script; "": none
