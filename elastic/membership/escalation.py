"""Finds the nodes at fault when a group repeatedly cannot be built.

docs/explanation/protocol.md, section 6, "Escalation".

Those who arrived at a build report whom they waited for. Pure state; for one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

IN_A_ROW = 3


class FailedBuilds:
    """Counts failed builds in a row, for each node that was waited for in all of them."""

    def __init__(self) -> None:
        self._row: dict[str, int] = {}

    def failed(
        self, members: Sequence[str], reports: Mapping[str, Sequence[str]]
    ) -> tuple[str, ...]:
        """A world of ``members`` (in rank order) broke; ``reports`` says whom each reporter
        waited for in vain. Without reports it was built, which ends every row.

        Returns who is to be left out now.
        """
        guilty = _at_fault(members, reports)
        self._row = {node: self._row.get(node, 0) + 1 for node in guilty}
        out = tuple(node for node in guilty if self._row[node] >= IN_A_ROW)
        for node in out:
            del self._row[node]
        return out


def _at_fault(members: Sequence[str], reports: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Whom the most others waited for.

    Of several, those that reported nothing themselves: they never came. If all did (two nodes
    that cannot reach each other), only the most junior one is at fault, so that the others go on.
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
