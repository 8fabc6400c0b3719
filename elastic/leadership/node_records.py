"""The nodes' records about themselves, decoded on the thread of the leader's watch.

A new leader receives those of all nodes at once. Decoding thousands of them would delay the node's
thread, which renews the permission to train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import RecordError
from elastic.membership.records import (
    FailureReport,
    HangFacts,
    Keys,
    Node,
    NodeStepTimes,
    decode,
)
from elastic.store.keyvalue import Entry, Put, Reset, WatchEvent

NodeRecord = Node | FailureReport | HangFacts | NodeStepTimes


@dataclass(frozen=True)
class NodesEvent:
    """Something changed under ``nodes/``, ``failure_reports/``, ``hangs/`` or ``step_times/``."""

    event: WatchEvent
    records: Mapping[str, NodeRecord | RecordError]  # by key: those of the event's entries


def watched_prefixes(keys: Keys) -> list[str]:
    """The keys that a leader watches."""
    return [keys.nodes, keys.failure_reports, keys.hangs, keys.step_times]


def decoded(keys: Keys, event: WatchEvent) -> NodesEvent:
    """The event with its records."""
    entries: tuple[Entry, ...] = ()
    match event:
        case Reset(snapshot):
            entries = snapshot.entries
        case Put(entry):
            entries = (entry,)
    return NodesEvent(event, {entry.key: read(keys, entry) for entry in entries})


def read(keys: Keys, entry: Entry) -> NodeRecord | RecordError:
    """The record, or why it is unreadable. A failure report is only about the node of its key."""
    kinds: tuple[tuple[str, type[NodeRecord]], ...] = (
        (keys.failure_reports, FailureReport),
        (keys.hangs, HangFacts),
        (keys.step_times, NodeStepTimes),
    )
    kind = next((cls for prefix, cls in kinds if entry.key.startswith(prefix)), Node)
    try:
        return decode(kind, entry.key, entry.value)
    except RecordError as error:
        return error
