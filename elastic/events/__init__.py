"""All events of journals and logs, as frozen dataclasses.

An event describes what happened; :mod:`elastic.telemetry.journal` adds its origin and time (node,
rank, generation, wall and monotonic time) when it writes it. One file for each part of the system:
start with ``membership`` for agents, and with ``training`` for workers. The rest of the project
imports events from here.

Imports only the standard library.
"""

from __future__ import annotations

from elastic.events.agent import (
    CollectiveFailed,
    HangFound,
    HangOver,
    HealthServed,
    LeaseLost,
    StoreProblem,
    StragglerFound,
    StragglerRecovered,
    WorkerDied,
    WorkerReplaced,
    WorkersNotReady,
    WorkersStarting,
    WorkerStuck,
    WorkersTuned,
)
from elastic.events.base import Event
from elastic.events.checkpoints import (
    CheckpointSaved,
    CheckpointSkipped,
    MemoryIntervalChanged,
    PartNotCopied,
)
from elastic.events.journal import JournalClosed, JournalOpened
from elastic.events.membership import (
    FailureJudged,
    FailureTimelineWritten,
    JobEnded,
    LeaderChanged,
    NodeArrived,
    NodeFound,
    NodeLeaving,
    NodeLost,
    NodeParked,
    NodeSuspected,
    Waiting,
    WorldEntered,
    WorldFormed,
)
from elastic.events.training import (
    Metrics,
    ProfileWritten,
    RankTimes,
    Recovered,
    RunClosed,
    StateReceived,
    StateRestored,
    StateSent,
    WorldFault,
    WorldJoined,
)

__all__ = [
    "CheckpointSaved",
    "CheckpointSkipped",
    "CollectiveFailed",
    "Event",
    "FailureJudged",
    "FailureTimelineWritten",
    "HangFound",
    "HangOver",
    "HealthServed",
    "JobEnded",
    "JournalClosed",
    "JournalOpened",
    "LeaderChanged",
    "LeaseLost",
    "MemoryIntervalChanged",
    "Metrics",
    "NodeArrived",
    "NodeFound",
    "NodeLeaving",
    "NodeLost",
    "NodeParked",
    "NodeSuspected",
    "PartNotCopied",
    "ProfileWritten",
    "RankTimes",
    "Recovered",
    "RunClosed",
    "StateReceived",
    "StateRestored",
    "StateSent",
    "StoreProblem",
    "StragglerFound",
    "StragglerRecovered",
    "Waiting",
    "WorkerDied",
    "WorkerReplaced",
    "WorkerStuck",
    "WorkersNotReady",
    "WorkersStarting",
    "WorkersTuned",
    "WorldEntered",
    "WorldFault",
    "WorldFormed",
    "WorldJoined",
]
