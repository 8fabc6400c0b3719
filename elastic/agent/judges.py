"""The leader's judgement of hangs and stragglers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from elastic.agent.node import NodeContext, WorldEntry
from elastic.hangs.page import MAX_SHOWN_RANKS, BudgetPolicy, RankFacts
from elastic.hangs.stragglers import (
    Comparison,
    RankKey,
    RankWindow,
    StragglerPolicy,
    Streak,
    advance,
)
from elastic.hangs.verdict import HangAction, judge
from elastic.membership.records import HangFacts, HangVerdict, NodeStepTimes, WorldRecord, encode
from elastic.telemetry.events import StragglerFound, StragglerRecovered

# ----------------------------------------------------------------------------
# The leader's evaluation of worlds without progress: facts of all nodes in, a verdict out.
#
# The verdict itself is a pure function (:mod:`elastic.hangs.verdict`). Every agent receives it
# from the store, and the acting one checks its worker once more before it acts.


class HangJudge:
    """One per term of leadership, on the node's thread."""

    def __init__(self, context: NodeContext, fence: Callable[[], tuple[str, int]]) -> None:
        self._context = context
        self._fence = fence
        options = context.options
        self._policy = BudgetPolicy(
            hang_timeout_s=options.hang_timeout_s, outside_step_s=options.hang_script_timeout_s
        )
        self._facts: dict[str, HangFacts] = {}
        self._announced: HangVerdict | None = None

    def reset(self) -> None:
        """Drop all data; the current records follow."""
        self._facts.clear()

    def put(self, key: str, facts: HangFacts) -> None:
        """Store the facts of a node. The key identifies it: a record is only about its writer."""
        self._facts[key.removeprefix(self._context.keys.hangs)] = facts

    def delete(self, key: str) -> None:
        """All ranks of a node make progress, or it is gone."""
        self._facts.pop(key.removeprefix(self._context.keys.hangs), None)

    def judge(self, entry: WorldEntry) -> None:
        """Write a verdict if there is a new one."""
        world = entry.world
        if world is None or not self._facts:
            return
        # Facts about the last world are superseded by this one.
        fresh = {n: f.ranks for n, f in self._facts.items() if f.generation >= world.generation}
        world = self._running(world)
        known = {node_id: fresh[node_id] for node_id in world.node_ids if node_id in fresh}
        ranks = tuple(r for of_node in known.values() for r in of_node)
        if not ranks:
            return
        verdict = judge(ranks, world.size, self._policy)
        if verdict.action is HangAction.WAIT:
            return
        record = HangVerdict(
            generation=max(r.generation for r in ranks),
            action=verdict.action,
            kind=verdict.kind,
            confidence=verdict.confidence,
            reason=verdict.reason,
            culprits=verdict.culprits[:MAX_SHOWN_RANKS],
            culprit=verdict.culprit,
            node_id=_acting_node(verdict.culprit, known, world),
            ranks=_sample(ranks, verdict.culprits),
            size=world.size,
        )
        if self._is_announced(record):
            return
        # A former leader must not replace the verdict of its successor.
        basis = [(self._context.keys.world, entry.mod_revision), self._fence()]
        written = self._context.store.compare_and_swap(
            self._context.keys.hang_verdict, encode(record), expected_revision=None, basis=basis
        )
        if written is not None:
            self._announced = record

    def _running(self, world: WorldRecord) -> WorldRecord:
        """A planned world does not run before a member has switched to it. (Joining ranks wait for
        that in a group of it.)"""
        running = self._context.status.running
        if world.switch_at_step is None or running is None:
            return world
        facts = (self._facts[n] for n in running.node_ids if n in self._facts)
        generations = (r.generation for of_node in facts for r in of_node.ranks)
        return world if max(generations, default=0) >= world.generation else running

    def _is_announced(self, record: HangVerdict) -> bool:
        announced = self._announced
        return announced is not None and _identity(announced) == _identity(record)


def _identity(record: HangVerdict) -> tuple[object, ...]:
    culprit = record.culprit
    at = (culprit.pid, culprit.generation, culprit.progress) if culprit is not None else ()
    return record.generation, record.kind, record.node_id, record.culprits, at


def _sample(ranks: tuple[RankFacts, ...], culprits: tuple[int, ...]) -> tuple[RankFacts, ...]:
    """At most MAX_SHOWN_RANKS of them: those at fault, one of each place in which ranks wait, and
    the first of the others. In a large job thousands wait at one place."""
    at_fault = set(culprits)
    places = {(r.phase, r.call): r for r in reversed(ranks)}
    chosen = [r for r in ranks if r.rank in at_fault][: MAX_SHOWN_RANKS // 2]
    chosen += list(places.values())[: MAX_SHOWN_RANKS // 4]
    first = {id(r): r for r in (*chosen, *ranks)}
    return tuple(sorted(list(first.values())[:MAX_SHOWN_RANKS], key=lambda r: r.rank))


def _acting_node(
    culprit: RankFacts | None, known: dict[str, tuple[RankFacts, ...]], world: WorldRecord
) -> str:
    """The node of the culprit, or of rank 0."""
    for node_id, ranks in known.items():
        if culprit is not None and culprit in ranks:
            return node_id
    return world.node_ids[0]


# ----------------------------------------------------------------------------
# The leader's comparison of the step times of all ranks: stragglers are detected and named.
#
# The comparison is pure (:mod:`elastic.hangs.stragglers`). It takes place once every rank of
# the world has completed another window. Actions on a straggler are decided together with worlds
# (:mod:`elastic.membership.decision`), and only with ``straggler_action=exclude``.


class StragglerJudge:
    """One per term of leadership, on the node's thread."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
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
        self._times[key.removeprefix(self._context.keys.step_times)] = times
        self._has_news = True

    def delete(self, key: str) -> None:
        """A node is gone."""
        self._times.pop(key.removeprefix(self._context.keys.step_times), None)

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
        for straggler in verdict.found:
            self._report_straggler(straggler)
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

    def _report_straggler(self, straggler: Comparison) -> None:
        of, times = straggler.window, straggler.window.times
        reason = straggler.sentence(self._policy.windows)
        if self._excludes and straggler.has_majority:
            self._excludable[of.key] = reason
        self._context.journal.emit(
            StragglerFound(
                generation=times.generation,
                rank=of.rank,
                node=of.node,
                cause=straggler.cause.label,
                factor=round(straggler.factor, 3),
                z_score=round(straggler.z_score, 2),
                windows=self._policy.windows,
                data_s=round(times.data_s, 6),
                compute_s=round(times.compute_s, 6),
                collective_s=round(times.collective_s, 6),
                checkpoint_s=round(times.checkpoint_s, 6),
                script_s=round(times.script_s, 6),
                typical_data_s=round(straggler.typical_data_s, 6),
                typical_compute_s=round(straggler.typical_compute_s, 6),
                lag_s=round(straggler.lag_s, 6),
                reason=reason,
            ),
            level=logging.WARNING,
        )

    def _report_recovery(self, recovered: Comparison) -> None:
        of = recovered.window
        self._excludable.pop(of.key, None)
        self._context.journal.emit(
            StragglerRecovered(
                generation=of.times.generation,
                rank=of.rank,
                node=of.node,
                factor=round(recovered.factor, 3),
            )
        )
