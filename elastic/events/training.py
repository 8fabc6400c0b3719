"""Events of a worker: its state, recoveries, steps and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.events.base import Event


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
