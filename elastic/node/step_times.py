"""Publishes the step times of this node's workers, for the detection of stragglers.

A worker reports once a window, and this node writes one small record for all of them. The leader
compares (:mod:`elastic.leadership.judges.straggler_judge`). Everything runs on the node's thread.
"""

from __future__ import annotations

from elastic.membership.records import NodeStepTimes, encode
from elastic.node.context import NodeContext
from elastic.store.keyvalue import Lease
from elastic.stragglers.facts import RankStepTimes, StepDurations


class StepTimesReport:
    """One per agent. If the options turn it off, no worker reports."""

    def __init__(self, context: NodeContext) -> None:
        self._at = context
        self._times: dict[int, RankStepTimes] = {}  # by pid
        self._fresh: set[int] = set()  # reported since the record was written

    def on_report(self, pid: int, local_rank: int, times: StepDurations) -> None:
        """A window of a worker has ended."""
        self._times[pid] = RankStepTimes(local_rank=local_rank, times=times)
        self._fresh.add(pid)

    def on_ended(self, pid: int) -> None:
        """A worker has ended."""
        self._times.pop(pid, None)
        self._fresh.discard(pid)

    def publish(self, lease: Lease) -> None:
        """Write the record once all workers have reported: their windows end together. Called with
        the node's live lease."""
        if not self._fresh or len(self._fresh) < self._at.status.node.nproc:
            return
        node_id = self._at.status.node.node_id
        ranks = tuple(sorted(self._times.values(), key=lambda known: known.local_rank))
        record = NodeStepTimes(node_id=node_id, ranks=ranks)
        self._at.store.put(self._at.keys.step_times_of(node_id), encode(record), lease=lease)
        self._fresh.clear()
