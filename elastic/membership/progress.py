"""The job's progress: a record for users, which affects no decision.

The leader's node writes it, at most once in PROGRESS_S and under its own lease; `elastic status`
and `elastic wait` read it. It is not watched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastic.errors import RecordError
from elastic.membership.records import RECORD_VERSION, packed, unpacked
from elastic.wire import typed_json

MAX_WAITING = 64  # nodes whose reason is recorded
MAX_REASON_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class RecordedHeartbeat:
    """The last heartbeat of a node that the leader has received."""

    node_id: str
    generation: int  # the newest in which its workers have begun a step; 0: none, or not known
    step: int | None  # committed, as its workers reported; None: not known
    heard_at_s: float  # wall clock of the leader
    has_joined: bool = False  # a worker has called elastic.join()


@dataclass(frozen=True, kw_only=True)
class WaitingNode:
    """A node that is not admitted to the world."""

    node_id: str
    reason: str  # in words


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """Key ``progress``, on the leader's lease."""

    node_id: str  # of the leader
    generation: int  # in which its workers step; 0: none
    step: int | None  # committed, as reported by its workers; None: not known
    step_time_s: float  # a recent step's duration; 0: not known
    checkpoint_step: int | None  # of the last checkpoint that its workers reported as committed
    time_s: float  # wall clock of the leader
    checkpoint_at_s: float | None = None  # when the leader's node learned of it, wall clock
    planned_steps: int | None = None  # of the whole job; None: not set by the script
    goodput: float | None = None  # 0 to 1, an estimate: elastic/telemetry/ledger.py
    goodput_since_s: float | None = None  # wall clock: what it covers
    heartbeats: tuple[RecordedHeartbeat, ...] = ()  # of the nodes, the leader's own included
    waiting: tuple[WaitingNode, ...] = ()  # of at most MAX_WAITING nodes
    version: int = RECORD_VERSION


def encode_progress(progress: JobProgress) -> bytes:
    """As JSON."""
    return packed(
        json.dumps(typed_json.to_json(progress), sort_keys=True, allow_nan=False).encode()
    )


def decode_progress(key: str, value: bytes) -> JobProgress:
    """Parse strictly. Raises RecordError."""
    try:
        return typed_json.convert(JobProgress, typed_json.parse(unpacked(key, value)))
    except typed_json.DecodeError as error:
        raise RecordError(
            f"{key}: the record {error}",
            hint="another version of torch-elastic-harness may have written it",
        ) from None
