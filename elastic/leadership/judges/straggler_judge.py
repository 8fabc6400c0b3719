"""The leader's comparison of the step times of all ranks: stragglers are detected and named.

The comparison is pure (:mod:`elastic.stragglers.detector`). It takes place once every rank of the
world has completed another window. Actions on a straggler are decided together with worlds
(:mod:`elastic.membership.surviving_world`), and only with ``straggler_action=exclude``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from elastic.events import StragglerFound, StragglerRecovered
from elastic.membership.records import NodeStepTimes, WorldRecord
from elastic.node.context import NodeContext
from elastic.stragglers.detector import (
    Comparison,
    RankKey,
    RankWindow,
    StragglerPolicy,
    Streak,
    advance,
)


class StragglerJudge:
    """One per term of leadership, on the node's thread."""

    def __init__(self, context: NodeContext) -> None:
        self._at = context
        options = context.options
        self._is_on = options.straggler_action != "off"
        self._excludes = options.straggler_action == "exclude"
        self._policy = StragglerPolicy(factor=options.straggler_factor)
        self._times: dict[str, NodeStepTimes] = {}
        self._has_news = False
        self._judged: dict[RankKey, tuple[int, int]] = {}  # generation and window
        self._streaks: Mapping[RankKey, Streak] = {}
        self._excludable: dict[RankKey, str] = {}  # with the reason

    def reset(self) -> None:
        """Drop all data; the current records follow."""
        self._times.clear()

    def put(self, key: str, times: NodeStepTimes) -> None:
        """Store a window of a node. The key identifies it: a record is only about its writer."""
        self._times[key.removeprefix(self._at.keys.step_times)] = times
        self._has_news = True

    def delete(self, key: str) -> None:
        """A node is gone."""
        self._times.pop(key.removeprefix(self._at.keys.step_times), None)

    def judge(self, world: WorldRecord | None, present: Collection[str]) -> None:
        """Compare the ranks if all have completed another window; report the stragglers.

        ``present``: ids of the nodes that have a key. Data about others is dropped.
        """
        if world is None or not self._is_on or not self._has_news:
            return
        self._has_news = False
        self._retain_only(present)
        ranks = self._windows(world)
        if len(ranks) < world.size:
            return
        self._judged = {r.key: (r.times.generation, r.times.window) for r in ranks}
        verdict = advance(self._streaks, ranks, self._policy)
        self._streaks = verdict.streaks
        for found in verdict.found:
            self._report_straggler(found)
        for recovered in verdict.recovered:
            self._report_recovery(recovered)

    def stragglers(self) -> dict[str, str]:
        """The nodes that may be excluded if others wait for their places, and why."""
        return {node_id: reason for (node_id, _), reason in self._excludable.items()}

    def _windows(self, world: WorldRecord) -> list[RankWindow]:
        """The new windows of the ranks that run ``world``; of a planned world, none before the
        switch."""
        windows = []
        first = 0
        for member in world.members:
            times = self._times.get(member.node_id)
            for known in times.ranks if times is not None else ():
                window = RankWindow(
                    rank=first + known.local_rank,
                    node_id=member.node_id,
                    node=member.name,
                    local_rank=known.local_rank,
                    times=known.times,
                )
                at = (known.times.generation, known.times.window)
                is_new = at != self._judged.get(window.key)
                if is_new and known.times.generation == world.generation:
                    windows.append(window)
            first += member.nproc
        return windows

    def _retain_only(self, present: Collection[str]) -> None:
        self._streaks = {k: s for k, s in self._streaks.items() if k[0] in present}
        self._excludable = {k: why for k, why in self._excludable.items() if k[0] in present}

    def _report_straggler(self, found: Comparison) -> None:
        of, times = found.window, found.window.times
        reason = found.sentence(self._policy.windows)
        if self._excludes and found.has_majority:
            self._excludable[of.key] = reason
        self._at.journal.emit(
            StragglerFound(
                generation=times.generation,
                rank=of.rank,
                node=of.node,
                cause=found.cause.label,
                factor=round(found.factor, 3),
                z_score=round(found.z_score, 2),
                windows=self._policy.windows,
                data_s=round(times.data_s, 6),
                compute_s=round(times.compute_s, 6),
                collective_s=round(times.collective_s, 6),
                checkpoint_s=round(times.checkpoint_s, 6),
                script_s=round(times.script_s, 6),
                typical_data_s=round(found.typical_data_s, 6),
                typical_compute_s=round(found.typical_compute_s, 6),
                lag_s=round(found.lag_s, 6),
                reason=reason,
            ),
            level=logging.WARNING,
        )

    def _report_recovery(self, recovered: Comparison) -> None:
        of = recovered.window
        self._excludable.pop(of.key, None)
        self._at.journal.emit(
            StragglerRecovered(
                generation=of.times.generation,
                rank=of.rank,
                node=of.node,
                factor=round(recovered.factor, 3),
            )
        )
