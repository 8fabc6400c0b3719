"""Identifies the nodes at fault when a group repeatedly cannot be built.

docs/explanation/protocol.md, section 6, "Escalation".

The nodes that arrived at a build report the missing ones. Pure state; for one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

IN_A_ROW = 3


class FailedBuilds:
    """Counts failed builds in a row, for each node that was missing from all of them, and for each
    two nodes of which one missed the other: which of the two reports depends on which of them opens
    the connection, in each build anew."""

    def __init__(self) -> None:
        self._streaks: dict[frozenset[str], int] = {}

    def failed(
        self,
        members: Sequence[str],
        reports: Mapping[str, Sequence[str]],
        *,
        has_run: bool = True,
    ) -> tuple[str, ...]:
        """A world of ``members`` (in rank order) broke; ``reports`` has the nodes for which each
        reporter waited in vain. Without reports, a world that some member has run resets all
        counts. If none has, the reports are late: another member was released first.

        Returns the nodes to be excluded now.
        """
        if not has_run and not any(reports.values()):
            return ()
        causes = {node: _causes(node, reports) for node in _at_fault(members, reports)}
        self._streaks = {
            cause: self._streaks.get(cause, 0) + 1
            for cause in {cause for of_node in causes.values() for cause in of_node}
        }
        out = tuple(
            node
            for node, of_node in causes.items()
            if max(self._streaks[cause] for cause in of_node) >= IN_A_ROW
        )
        for cause in (cause for node in out for cause in causes[node]):
            self._streaks.pop(cause, None)
        return out


def _causes(node: str, reports: Mapping[str, Sequence[str]]) -> list[frozenset[str]]:
    """The node itself, and its connection to the other one if only one other waited for it."""
    accusers = [reporter for reporter, accused in reports.items() if node in accused]
    others = [reporter for reporter in accusers if reporter != node]
    alone = [frozenset((node, *others))] if len(others) == 1 else []
    return [frozenset((node,)), *alone]


def _at_fault(members: Sequence[str], reports: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The nodes for which the largest number of others waited.

    If there are several, those without a report: they never arrived. If all reported (two nodes
    that cannot reach each other), only the most junior one is at fault, so that the others can
    continue.
    """
    accusers = Counter(
        node
        for reporter, accused in reports.items()
        for node in set(accused)
        if node != reporter and node in members
    )
    most = max(accusers.values(), default=0)
    worst = [node for node in members if most and accusers[node] == most]
    silent = [node for node in worst if node not in reports]
    return tuple(silent or worst[-1:])
