"""The leader's evaluation of worlds without progress: facts of all nodes in, a verdict out.

The verdict itself is a pure function (:mod:`elastic.hangs.verdict`). Every agent receives it from
the store, and the acting one checks its worker once more before it acts.
"""

from __future__ import annotations

from elastic.hangs.budgets import BudgetPolicy
from elastic.hangs.facts import MAX_SHOWN_RANKS, RankFacts
from elastic.hangs.verdict import HangAction, judge
from elastic.membership.records import (
    HangFacts,
    HangVerdict,
    WorldRecord,
    encode,
)
from elastic.node.context import NodeContext
from elastic.node.status import WorldEntry


class HangJudge:
    """One per term of leadership, on the node's thread."""

    def __init__(self, context: NodeContext) -> None:
        self._at = context
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
        self._facts[key.removeprefix(self._at.keys.hangs)] = facts

    def delete(self, key: str) -> None:
        """All ranks of a node make progress, or it is gone."""
        self._facts.pop(key.removeprefix(self._at.keys.hangs), None)

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
        basis = (self._at.keys.world, entry.mod_revision)
        written = self._at.store.compare_and_swap(
            self._at.keys.hang_verdict, encode(record), expected_revision=None, basis=basis
        )
        if written is not None:
            self._announced = record

    def _running(self, world: WorldRecord) -> WorldRecord:
        """A planned world does not run before a member has switched to it."""
        running = self._at.status.running
        if world.switch_at_step is None or running is None:
            return world
        generations = (r.generation for facts in self._facts.values() for r in facts.ranks)
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
