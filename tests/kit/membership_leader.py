"""What a leader knows about the nodes of a model: the production roster, fed with the model's keys
and the answers of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic.agent.liveness import Connections, Verdict
from elastic.agent.roster import Roster
from elastic.membership.records import FailureReport, Keys, Node, WorldRecord, encode
from elastic.membership.view import View
from elastic.store.keyvalue import Entry
from elastic.wire.messages import WorldReference

KEYS = Keys.of("/elastic", "job")


class ModelLeader:
    """One term. A new leader knows the keys that exist, and the worlds that its own node has
    seen."""

    def __init__(self, worlds: Iterable[WorldRecord] = ()) -> None:
        self._worlds = list(worlds)
        self._world: WorldRecord | None = None
        self._world_since_s = 0.0
        self._reported: set[str] = set()
        self._last: dict[str, tuple[Node, int]] = {}
        self._roster = Roster(KEYS, Connections())

    def view(
        self,
        world: WorldRecord | None,
        records: Iterable[tuple[Node, bool]],
        verdicts: Mapping[str, Verdict],
        reports: Iterable[FailureReport],
        now: float,
    ) -> View:
        """``records``: those in the store, each with whether it is attached to a lease.
        ``verdicts``: of a probe of each node now, whether it has a key or not."""
        if world is not self._world:
            self._world, self._world_since_s = world, now
            self._worlds += [world] if world is not None else []
            self._roster.learn_worlds(self._worlds)
        keys = {}
        for node, has_lease in records:
            keys[node.node_id] = node
            self._put(node, int(has_lease), now)
        for node_id in self._roster.with_keys():
            if node_id not in keys:
                self._roster.delete(node_id, now)
        self._put_reports(reports, now)
        self._roster.suspect_members_without_key(world, now)
        self._roster.forget_non_members(world)
        for node_id in {*keys, *(m.node_id for m in (world.tracked if world else ()))}:
            self._roster.resolve(node_id, verdicts[node_id], now)
        assert not self._roster.unresolved()
        return self._roster.view(world, self._world_since_s, done=None, quarantined={})

    def _put(self, node: Node, lease_id: int, now: float) -> None:
        known = self._roster.find(node.node_id)
        is_present = known is not None and known.present
        last, last_lease_id = self._last.get(node.node_id, (None, 0))
        if not is_present or last is not node or last_lease_id != lease_id:
            self._last[node.node_id] = node, lease_id
            self._roster.put(_named(node), lease_id, now)

    def _put_reports(self, reports: Iterable[FailureReport], now: float) -> None:
        by_id = {report.node_id: report for report in reports}
        for node_id in [i for i in self._reported if i not in by_id]:
            self._roster.delete_failure_report(node_id)
        self._reported = set(by_id)
        for node_id, report in by_id.items():
            if self._roster.failure_report_of(node_id) != report:
                self._roster.put_failure_report(KEYS.failure_report(node_id), report, now)

    def knows(self, node: Node) -> bool:
        """Whether it has seen a key of this node, and not forgotten it."""
        return self._roster.find(node.node_id) is not None

    def unneeded(self, world: WorldRecord | None) -> tuple[str, ...]:
        """The nodes whose records the leader deletes now."""
        return self._roster.unneeded(world)


def _named(node: Node) -> Node:
    """As its key says it: the world that it runs by name only."""
    running = node.running
    if running is None:
        return node
    name = WorldReference(generation=running.generation, nonce=running.nonce)
    return replace(node, running=name)


def entry_of(node: Node, *, has_lease: bool) -> Entry:
    """Its key in the store."""
    return Entry(KEYS.node(node.node_id), encode(node), 1, lease_id=int(has_lease))
