"""Events of an agent: its workers, its store, its settings."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.events.base import Event


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
