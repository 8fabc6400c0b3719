"""Identifies the nodes at fault when a group repeatedly cannot be built.

docs/explanation/protocol.md, section 6, "Escalation".

The nodes that arrived at a build report the missing ones. Pure state; for one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

IN_A_ROW = 3


class FailedBuilds:
    """Counts failed builds in a row, for each node that was missing from all of them."""

    def __init__(self) -> None:
        self._streaks: dict[str, int] = {}

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
        at_fault = _at_fault(members, reports)
        self._streaks = {node: self._streaks.get(node, 0) + 1 for node in at_fault}
        out = tuple(node for node in at_fault if self._streaks[node] >= IN_A_ROW)
        for node in out:
            del self._streaks[node]
        return out


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
