"""All events of journals and logs, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

# ----------------------------------------------------------------------------
# The base class of all events.


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base. The class name, in kebab case, is the event's name in the journal."""


# ----------------------------------------------------------------------------
# The first and the last event of a process's journal.


@dataclass(frozen=True, kw_only=True)
class JournalOpened(Event):
    """A process begins its journal, or continues it in a new file."""

    schema: int  # version of the lines that follow
    role: str  # "agent" or "worker"
    run_id: str | None  # the name of the job; null: unknown
    pid: int  # of the process
    host: str  # the machine's name
    boot_id: str  # of the machine: its processes share a monotonic clock; "": unknown
    library: str  # version of torch-elastic-harness; "": unknown


@dataclass(frozen=True, kw_only=True)
class JournalClosed(Event):
    """The last line of a process that ended normally."""


# ----------------------------------------------------------------------------
# Events of membership: joining and leaving nodes, the leader, worlds, the end of the job.


@dataclass(frozen=True, kw_only=True)
class NodeArrived(Event):
    """This node waits for a world. ``failure`` and ``exit_code`` are those of the worker whose
    failure is the reason."""

    after_generation: int  # the generation that its workers have left; 0: none
    failure: str | None  # of its workers; null: none
    exit_code: int | None  # theirs


@dataclass(frozen=True, kw_only=True)
class WorldFormed(Event):
    """A world was agreed."""

    generation: int  # of the new world
    nodes: tuple[str, ...]  # names, in the order of ranks
    size: int  # number of workers
    state: str  # "active", or "paused" with too few nodes
    mode: str  # how workers enter it: "start" (a first world), "restart" or "in-process"
    cause: str  # first, lost, left, failure, joined, paused, resumed, takeover or unfinished
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class WorldEntered(Event):
    """This node passes the world to its workers."""

    generation: int  # of the world
    first_rank: int  # global rank of this node's local rank 0
    size: int  # number of workers in the world
    waited_s: float  # since this node arrived


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """The leader waits before it forms the next world, or a starting node for a leader."""

    reason: str  # what it waits for, a sentence


@dataclass(frozen=True, kw_only=True)
class LeaderChanged(Event):
    """The job has another leader, or none."""

    leader: str | None  # node id; null: none


@dataclass(frozen=True, kw_only=True)
class NodeSuspected(Event):
    """A member may be dead."""

    suspect: str  # name of the member
    reason: str  # the evidence


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """A member is lost."""

    lost: str  # name of the member
    reason: str  # the proof


@dataclass(frozen=True, kw_only=True)
class NodeFound(Event):
    """A node that was considered dead responds."""

    found: str  # name of the node
    reason: str  # how it was detected


@dataclass(frozen=True, kw_only=True)
class NodeLeaving(Event):
    """This node was asked to leave, or its workers failed and are not started again."""

    reason: str  # the origin of the request, or the first error
    failed: bool = False  # without a request


@dataclass(frozen=True, kw_only=True)
class FailureJudged(Event):
    """The leader's verdict on the failure that broke a world, and the evidence."""

    generation: int  # of the world that broke
    failed: str  # the node's name
    action: str  # restart, exclude-node or stop
    rule: str  # its name: docs/reference/failures.md
    confidence: str  # in the verdict
    reason: str  # a sentence
    evidence: str  # the text that the rule has matched


@dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """The job has ended."""

    outcome: str  # "success" or "failure"
    reason: str  # a sentence
    exit_code: int  # the job's


@dataclass(frozen=True, kw_only=True)
class FailureTimelineWritten(Event):
    """The job has failed: a page with its failures, their times, and the actions taken."""

    timeline: str  # the page
    report: str  # the path of the same page; "": it could not be written
    problem: str  # why not


@dataclass(frozen=True, kw_only=True)
class NodeParked(Event):
    """The job has ended; this agent keeps running without workers until SIGTERM."""

    outcome: str  # "success" or "failure"
    exit_code: int  # the job's
    reason: str  # how the job ended


# ----------------------------------------------------------------------------
# Events of an agent: its workers, its store, its settings.


@dataclass(frozen=True, kw_only=True)
class WorkersStarting(Event):
    """torchrun starts worker processes on this node: all of them, or a replacement of one."""


@dataclass(frozen=True, kw_only=True)
class WorkerDied(Event):
    """A worker process ended prematurely."""

    pid: int  # of the worker
    local_rank: int  # of the worker
    reason: str  # a sentence, or its last traceback
    kernel_log: str = ""  # relevant lines since the workers started, or why none can be read


@dataclass(frozen=True, kw_only=True)
class WorkerReplaced(Event):
    """A process was started to replace a dead worker; the node's other workers keep theirs."""

    local_rank: int  # of both
    pid: int  # of the new process


@dataclass(frozen=True, kw_only=True)
class WorkersNotReady(Event):
    """Workers of this node are ready to train, and wait for others of it."""

    waited_s: float  # since the first of them was ready
    reason: str  # what each of the others has not done yet


@dataclass(frozen=True, kw_only=True)
class WorkerStuck(Event):
    """A worker ends itself, because an uninterruptible call has not returned in time."""

    reason: str  # the call, and the operation that it blocks


@dataclass(frozen=True, kw_only=True)
class CollectiveFailed(Event):
    """A worker's collective failed, possibly because a peer has died."""

    generation: int  # of the world
    local_rank: int  # of the worker
    error: str  # what was raised


@dataclass(frozen=True, kw_only=True)
class HangFound(Event):
    """A world makes no progress: the culprits, and the action of this node."""

    generation: int  # of the world
    action: str  # of this node
    kind: str  # of hang: docs/explanation/hangs.md
    ranks: tuple[int, ...]  # the culprits
    confidence: str  # in the verdict
    reason: str  # a sentence
    where: str = ""  # function, file and line of the script that the first culprit is in, if known
    report: str  # the path of the hang report; "": none was written


@dataclass(frozen=True, kw_only=True)
class HangOver(Event):
    """A rank that was considered hung makes progress again and is not ended."""

    hung_rank: int  # the rank
    reason: str  # why


@dataclass(frozen=True, kw_only=True)
class StragglerFound(Event):
    """A rank delays the others: its own work takes longer than theirs. Times are per step."""

    generation: int  # in which it trains
    rank: int  # of the straggler
    node: str  # on which it runs
    cause: str  # data wait or compute
    factor: float  # its own time per sample, as a multiple of the typical one
    z_score: float  # robust: its distance from the median, in scaled median absolute deviations
    windows: int  # in a row
    data_s: float  # waiting for its data loader
    compute_s: float  # forward, backward and optimizer
    collective_s: float  # waiting for the other ranks
    checkpoint_s: float  # saving
    script_s: float  # the script's other code
    typical_data_s: float  # the median of all ranks
    typical_compute_s: float  # the median of all ranks
    lag_s: float  # for which the others wait
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class StragglerRecovered(Event):
    """A rank that was a straggler keeps up with the others again."""

    generation: int  # in which it trains
    rank: int  # of the former straggler
    node: str  # on which it runs
    factor: float  # its own time per sample now, as a multiple of the typical one


@dataclass(frozen=True, kw_only=True)
class WorkersTuned(Event):
    """The network profile and interface of the workers about to be started."""

    profile: str  # infiniband, roce, ethernet, cloud or single-node
    reason: str  # why this profile
    interface: str | None  # for NCCL and gloo; null: their own choice
    interface_reason: str | None  # why this interface


@dataclass(frozen=True, kw_only=True)
class HealthServed(Event):
    """This agent answers /livez, /readyz and /metrics."""

    port: int  # TCP


@dataclass(frozen=True, kw_only=True)
class StoreProblem(Event):
    """The store failed a call, ended a watch, or was wiped, with the consequence."""

    error: str  # "": the problem is resolved
    consequence: str  # action of this node


@dataclass(frozen=True, kw_only=True)
class LeaseLost(Event):
    """This node's lease has expired in the store."""

    consequence: str  # action of this node


# ----------------------------------------------------------------------------
# Events of a worker: its state, recoveries, steps and metrics.


@dataclass(frozen=True, kw_only=True)
class StateRestored(Event):
    """A worker restored its state, or started from the initial one."""

    source: str  # "initial" | checkpoint name
    step: int  # committed in the state
    duration_s: float  # to read and verify it


@dataclass(frozen=True, kw_only=True)
class WorldJoined(Event):
    """A worker entered a new world without a restart, and all ranks agree on the state."""

    generation: int  # of the new world
    rank: int  # in it
    size: int  # number of workers
    step: int  # committed in the state
    source: int | None  # the rank that had the state; None: a checkpoint, or the initial state
    duration_s: float  # to agree, transfers included


@dataclass(frozen=True, kw_only=True)
class StateReceived(Event):
    """A worker received its weights from others."""

    source: int  # rank whose description of the state it is
    sources: tuple[int, ...] = ()  # ranks that sent a part of it
    step: int  # committed in the state
    bytes: int  # received
    duration_s: float  # of the transfer


@dataclass(frozen=True, kw_only=True)
class StateSent(Event):
    """A worker sent its weights to others."""

    receivers: tuple[int, ...]  # ranks
    step: int  # committed in the state
    bytes: int  # sent
    duration_s: float  # of the transfer


@dataclass(frozen=True, kw_only=True)
class WorldFault(Event):
    """A worker's step was interrupted by the end of the world."""

    generation: int  # of the ended world
    step: int  # committed before the fault
    error: str  # what was raised
    traceback: str = ""  # of it; "": unknown


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """A worker continues after a change of the world."""

    generation: int  # of the new world
    step: int  # committed in the state
    duration_s: float  # from the fault, or the switch, to the next call of the training function
    leave_s: float  # part of it: destroying the old group
    wait_s: float  # waiting for the next world
    build_s: float  # building its group
    agree_s: float  # agreeing on the state, and sending it to the ranks that lack it
    paused_s: float  # in paused worlds, which have too few nodes
    wrap_s: float  # initialising DDP, and the rest


@dataclass(frozen=True, kw_only=True)
class RankTimes(Event):
    """How a rank has spent its time since its last such event, or since its world began.

    The parts add up to ``duration_s``. Written every STEP_TIMES_S seconds, after the first step of
    a world, and when a world ends.
    """

    generation: int  # of the world
    step: int  # committed by now
    steps: int  # of them in this window
    duration_s: float  # the window ends when the event is written
    productive_s: float  # in committed steps, without the following parts
    data_s: float  # waiting for batches
    checkpoint_s: float  # training waited for checkpoints
    evaluation_s: float  # forward passes in eval mode
    open_s: float  # since the last commit, without the parts above: an unfinished step
    collective_s: float  # of productive_s: waiting for other ranks
    ended: str  # why the window ends: "due", "first-step", "fault", "change" or "close"


@dataclass(frozen=True, kw_only=True)
class Metrics(Event):
    """Values logged by the script (``run.log``): the newest of each name since the last such event.

    Rank 0 writes at most one every METRICS_EVENT_S seconds. If ``step`` is not above that of an
    earlier event, steps were repeated: this event replaces those of its step and later ones.
    """

    step: int  # committed, of the newest value
    values: dict[str, float]  # by name
    means: tuple[str, ...]  # names of means over all ranks; the other values are rank 0's own


@dataclass(frozen=True, kw_only=True)
class ProfileWritten(Event):
    """A rank has profiled some steps."""

    path: str  # of the trace, on this node
    first: int  # steps committed when it began
    steps: int  # in the trace
    asked: int  # requested; more than ``steps``: the world ended before


@dataclass(frozen=True, kw_only=True)
class RunClosed(Event):
    """A worker's run was closed: after training, or with an error of the script."""

    clean: bool  # whether training was complete
    error: str  # of the script; "": none


# ----------------------------------------------------------------------------
# Outcomes of checkpoints.


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was committed, as seen by this rank."""

    name: str  # of the checkpoint
    step: int  # of its state
    duration_s: float  # from the step boundary until the checkpoint was committed
    stall_s: float  # part of it for which training waited
    bytes: int  # written by this rank


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint could not be saved or used; training continues with the others."""

    name: str  # of the checkpoint, or its step
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class MemoryIntervalChanged(Event):
    """All ranks save to the nodes' memory at another interval, chosen from measured costs."""

    every_steps: int  # between two saves from now on
    before: int  # the interval that was in use
    reason: str  # what a save and a step cost
