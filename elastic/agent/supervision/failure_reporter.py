"""This node's failure report in the store: written under its lease, removed once handled."""

from __future__ import annotations

import itertools
from collections import Counter

from elastic.membership.records import FailureReport, WorldRecord, encode
from elastic.node.context import NodeContext
from elastic.store.keyvalue import Lease

_ERROR_CHARACTERS = 500
_ACCUSED = 64  # every node may report as many: half of a large job may be unreachable


class FailureReporter:
    """One per agent. At most one report at a time, of the newest generation that has failed."""

    def __init__(self, context: NodeContext) -> None:
        self._at = context
        self._report: FailureReport | None = None  # to be written, or written
        self._is_written = False

    def has_reported(self, generation: int) -> bool:
        """Whether there is a report for this generation or a later one."""
        return self._report is not None and self._report.generation >= generation

    def report(self, generation: int, error: str, *, accused: tuple[str, ...] = ()) -> None:
        """Replace the report; :meth:`publish` writes it. ``accused``: ids of nodes."""
        self._report = FailureReport(
            node_id=self._at.status.node.node_id,
            generation=generation,
            error=error[:_ERROR_CHARACTERS],
            accused=accused[:_ACCUSED],
        )
        self._is_written = False

    def publish(self, lease: Lease) -> None:
        """Write the report, or remove it once a newer world has superseded it."""
        report = self._report
        if report is None:
            return
        key = self._at.keys.failure_report(self._at.status.node.node_id)
        newest = self._at.status.world.world
        is_answered = newest is not None and newest.generation > report.generation
        if is_answered and newest is not None and newest.switch_at_step is None:
            if self._is_written:
                self._at.store.delete(key)
            self._report = None
        elif not self._is_written:
            self._at.store.put(key, encode(report), lease=lease)
            self._is_written = True

    def register_again(self) -> None:
        """The lease is new: keys of the old one are deleted."""
        self._is_written = False


def nodes_of(world: WorldRecord | None, generation: int, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The nodes that run these ranks of that generation."""
    if world is None or world.generation != generation:
        return ()
    firsts = itertools.accumulate((m.nproc for m in world.members), initial=0)
    return tuple(
        m.node_id
        for m, first in zip(world.members, firsts, strict=False)
        if any(0 <= rank - first < m.nproc for rank in ranks)
    )


def nodes_at(
    world: WorldRecord | None, generation: int, addresses: tuple[str, ...]
) -> tuple[str, ...]:
    """The nodes of that generation at these addresses; none if several nodes share one."""
    if world is None or world.generation != generation:
        return ()
    at = Counter(m.liveness_host for m in world.members)
    return tuple(
        m.node_id
        for m in world.members
        if m.liveness_host in addresses and at[m.liveness_host] == 1
    )
