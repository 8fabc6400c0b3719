"""What an agent does and meets: its workers, its store, its settings."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.events.base import Event


@dataclass(frozen=True, kw_only=True)
class WorkersStarting(Event):
    """torchrun starts worker processes on this node: all of them, or one in a dead one's place."""


@dataclass(frozen=True, kw_only=True)
class WorkerDied(Event):
    """A worker process is gone before its time."""

    pid: int  # of the worker
    local_rank: int  # of the worker
    reason: str  # a sentence, or its last traceback
    kernel_log: str = ""  # telling lines since the workers started, or why none can be read


@dataclass(frozen=True, kw_only=True)
class WorkerReplaced(Event):
    """A process was started in the place of a dead worker; its siblings keep theirs."""

    local_rank: int  # of both
    pid: int  # of the new process


@dataclass(frozen=True, kw_only=True)
class WorkerStuck(Event):
    """A worker ends itself: a call that nothing can interrupt has not returned in time."""

    reason: str  # which call, and what was to follow


@dataclass(frozen=True, kw_only=True)
class CollectiveFailed(Event):
    """A worker's collective failed: perhaps a peer has died."""

    generation: int  # of the world
    local_rank: int  # of the worker
    error: str  # what was raised


@dataclass(frozen=True, kw_only=True)
class HangFound(Event):
    """A world does not go on; who keeps it, and what this node does about it."""

    generation: int  # of the world
    action: str  # what this node does
    kind: str  # of hang: docs/explanation/hangs.md
    ranks: tuple[int, ...]  # the culprits
    confidence: str  # in the verdict
    reason: str  # a sentence
    where: str = ""  # function, file and line of the script that the first culprit is in, if known
    report: str  # the path of the hang report; "": none was written


@dataclass(frozen=True, kw_only=True)
class HangOver(Event):
    """A rank that was about to be ended as hung goes on."""

    hung_rank: int  # the rank
    reason: str  # why


@dataclass(frozen=True, kw_only=True)
class StragglerFound(Event):
    """A rank holds the others up: its own work takes longer than theirs. Times are of a step."""

    generation: int  # in which it trains
    rank: int  # of the straggler
    node: str  # on which it runs
    cause: str  # data wait or compute
    factor: float  # its own time per sample, as a multiple of the typical one
    z_score: float  # robust: its distance from the median, in scaled median absolute deviations
    windows: int  # in a row
    data_s: float  # it waited for its data loader
    compute_s: float  # forward, backward and optimizer
    collective_s: float  # it waited for the other ranks
    checkpoint_s: float  # it saved
    script_s: float  # the script's other code
    typical_data_s: float  # the median of all ranks
    typical_compute_s: float  # the median of all ranks
    lag_s: float  # what the others wait for
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
    """The network profile and the interface of the workers that are started next."""

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
    """The store failed a call, cut a watch, or was wiped; what is done about it."""

    error: str  # "" where the problem is over
    consequence: str  # what is done about it


@dataclass(frozen=True, kw_only=True)
class LeaseLost(Event):
    """The store says that this node's lease is gone."""

    consequence: str  # what is done about it
