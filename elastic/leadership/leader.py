"""The leader's tasks: watch the nodes, probe suspected ones, decide, write worlds.

Runs on the node service's thread; only probes run elsewhere (:mod:`elastic.leadership.prober`).
Nothing is decided while a node is suspected: a probe takes milliseconds, but a world formed with a
dead member costs a restart of all nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from elastic.errors import RecordError
from elastic.events import FailureJudged, NodeFound, NodeLost, NodeSuspected, StoreProblem, Waiting
from elastic.leadership.failure_accounting import Broken, FailureAccounting
from elastic.leadership.judges.hang_judge import HangJudge
from elastic.leadership.judges.straggler_judge import StragglerJudge
from elastic.leadership.node_records import NodeRecord, NodesEvent, decoded, watched_prefixes
from elastic.leadership.prober import Probed, Prober
from elastic.leadership.roster import Roster
from elastic.leadership.world_writer import WorldWriter
from elastic.liveness.connections import Connections
from elastic.membership.decision import (
    Decision,
    End,
    Liveness,
    Policy,
    Proposal,
    View,
    Wait,
    decide,
    waiting_nodes,
)
from elastic.membership.member_status import classify_members
from elastic.membership.records import (
    Done,
    FailureReport,
    HangFacts,
    Node,
    NodeState,
    NodeStepTimes,
    Outcome,
    WorldRecord,
    WorldState,
)
from elastic.node.context import NodeContext
from elastic.node.status import WorldEntry
from elastic.store.keyvalue import Deleted, Entry, Put, Reset, Watch
from elastic.tuning.agent_intervals import (
    ADOPTION_WAIT_S,
    LEADER_IDLE_S,
    LEADER_UNLISTED_S,
    RECHECK_S,
)

# A node in such a state is expected to close its connection.
_EXITING = (NodeState.LEAVING, NodeState.FAILED, NodeState.FINISHED)


class Leadership:
    """One term as leader. Created on election, closed on losing leadership."""

    def __init__(
        self, context: NodeContext, announce: Callable[[bytes], None], connections: Connections
    ) -> None:
        self._at = context
        self._policy = Policy.of(context.status.node, context.options)
        self._since_s = context.clock.monotonic()
        self.roster = Roster(context.keys, connections)
        self._listed = False
        self._accounting = FailureAccounting(context.options)
        self._accounting.remember(context.status.world.world, self._since_s, context.clock.wall())
        self._rechecked_generation = 0  # the generation whose failure made every member suspect
        self.writer = WorldWriter(context, self.roster, self._accounting, announce)
        self._waiting_reason = ""
        self.waiting: dict[str, str] = {}  # id of each node that is not admitted -> why
        self._prober = Prober(context, self.roster)
        self._hangs = HangJudge(context)
        self._stragglers = StragglerJudge(context)
        keys = context.keys
        self._watch: Watch = context.store.watch(
            watched_prefixes(keys),
            lambda event: context.post(decoded(keys, event)),
            name="elastic-watch-nodes",
        )

    def close(self) -> None:
        """End the term: no callback is called afterwards."""
        self._watch.close()
        self._prober.close()

    # ── events ───────────────────────────────────────────────────────────────────────────

    def on_nodes(self, change: NodesEvent, world: WorldRecord | None) -> None:
        """An event of the watch on ``nodes/`` and on the nodes' records about themselves."""
        now, records, keys = self._at.clock.monotonic(), change.records, self._at.keys
        match change.event:
            case Reset(snapshot, reason):
                if reason == "wiped":
                    self._since_s = now
                self._listed = True
                self._hangs.reset()
                self._stragglers.reset()
                self.roster.reset((e.key for e in snapshot.entries), now)
                for entry in snapshot.entries:
                    self._put(entry, records[entry.key], now)
                self._suspect_all(world, now)
            case Put(entry):
                self._put(entry, records[entry.key], now)
                if not entry.key.startswith((keys.hangs, keys.step_times)):
                    self._suspect_after_failure(entry.key, world, now)
            case Deleted(key) if key.startswith(keys.hangs):
                self._hangs.delete(key)
            case Deleted(key) if key.startswith(keys.step_times):
                self._stragglers.delete(key)
            case Deleted(key) if key.startswith(keys.failure_reports):
                self.roster.delete_failure_report(key.removeprefix(keys.failure_reports))
            case Deleted(key):
                self.roster.delete(key.removeprefix(keys.nodes), now)
            case _:
                pass

    def _put(self, entry: Entry, record: NodeRecord | RecordError, now: float) -> None:
        """A key was written. An invalid record does not affect the others."""
        match record:
            case RecordError():
                self._hangs.delete(entry.key)
                self._stragglers.delete(entry.key)
                self._report_record(record)
            case HangFacts():
                self._hangs.put(entry.key, record)
            case NodeStepTimes():
                self._stragglers.put(entry.key, record)
            case FailureReport():
                self.roster.put_failure_report(entry.key, record, now)
            case Node():
                self.roster.put(record, entry.lease_id, now)

    def on_closed(self, node_id: str) -> None:
        """A follower's connection closed, or this node's connection to a former leader."""
        known = self.roster.find(node_id)
        if known is not None and known.node.state not in _EXITING:
            self._at.journal.emit(
                NodeSuspected(suspect=self._name(node_id), reason="its connection closed"),
                level=logging.DEBUG,
            )
        self.roster.suspect(node_id, self._at.clock.monotonic())

    def on_opened(self, node_id: str) -> None:
        """A follower completed the handshake."""
        self.roster.connection_opened(node_id, self._at.clock.monotonic())

    def on_probed(self, probed: Probed) -> None:
        """A probe has returned its verdict."""
        self._prober.on_probed(probed)
        now, reason = self._at.clock.monotonic(), probed.verdict.reason
        was_dead = self.roster.is_dead(probed.node_id)
        changed = self.roster.settle(probed.node_id, probed.verdict, now)
        if changed is None:
            return
        name = self._name(probed.node_id)
        if (known := self.roster.find(probed.node_id)) and known.node.state is NodeState.FINISHED:
            return  # it may end at any time: it is not lost
        if was_dead:
            self._at.journal.emit(NodeFound(found=name, reason=reason), level=logging.WARNING)
            self._accounting.found(name)
        if changed is Liveness.DEAD:
            self._at.journal.emit(NodeLost(lost=name, reason=reason))
            self._accounting.lost(name, now)
        elif changed is Liveness.SUSPECT:
            self._at.journal.emit(NodeSuspected(suspect=name, reason=reason))

    def _suspect_all(self, world: WorldRecord | None, now: float) -> None:
        """Probe all nodes in a new term: one that died before it has no connection to close."""
        members = world.node_ids if world is not None else ()
        for node_id in {*members, *self.roster.with_keys()}:
            self.roster.suspect(node_id, now)

    def _suspect_after_failure(self, key: str, world: WorldRecord | None, now: float) -> None:
        """A member failed, or its collectives did: possibly because another one died.

        One round for each generation: hundreds of nodes report the same failure at once.
        """
        keys = self._at.keys
        node_id = key.removeprefix(keys.failure_reports).removeprefix(keys.nodes)
        known, report = self.roster.find(node_id), self.roster.failure_report_of(node_id)
        if known is None or world is None or node_id not in world.node_ids:
            return
        node = known.node
        failed = node.running is None and node.arrived_for >= world.generation
        running = node.running.generation if node.running is not None else world.generation
        has_failed = report is not None and report.generation >= running
        if (failed or has_failed) and self._rechecked_generation != world.generation:
            self._rechecked_generation = world.generation
            self.roster.suspect_members(world, now)

    def _report_record(self, error: RecordError) -> None:
        self._at.journal.emit(
            StoreProblem(error=str(error), consequence="this node is excluded"),
            level=logging.ERROR,
        )

    def _name(self, node_id: str) -> str:
        known = self.roster.find(node_id)
        return known.node.name if known is not None else node_id

    # ── decisions ────────────────────────────────────────────────────────────────────────

    def lead(self, entry: WorldEntry, done: Done | None) -> tuple[WorldEntry | Done | None, float]:
        """Decide and write. Returns the written world (or None), and the time of the next call."""
        now = self._at.clock.monotonic()
        if not self._listed:
            return None, now + LEADER_UNLISTED_S
        self.roster.learn_worlds(self._at.status.known_worlds)
        entry_or_wait = self.writer.adopt(entry, now, since_s=self._since_s)
        if isinstance(entry_or_wait, float):
            return None, entry_or_wait
        if entry_or_wait is not entry:
            return entry_or_wait, now
        world = entry.world
        self.roster.suspect_members_without_key(world, now)
        self.roster.forget_non_members(world)
        self._prober.start_probes(world, now)
        if self.roster.unsettled() or self._waits_for_registration(world, now):
            return None, now + RECHECK_S
        if world is None or world.members:  # (one without members has not gone on without them)
            self._delete_finished(world.node_ids if world is not None else ())
        self._accounting.observe(self._at.status.step_rate)
        view = self._view(entry, done, now)
        self.waiting = waiting_nodes(view, now, self._policy)
        decision = decide(view, now, self._policy)
        if isinstance(decision, Proposal) and world is not None:
            ended = self._charge(decision, view, entry, now)
            if ended is not None:
                return ended, now + RECHECK_S
            # The charge may have quarantined a node, which is then excluded at once.
            decision = decide(self._view(entry, done, now), now, self._policy)
        return self._act(decision, entry, now)

    def judge(self, entry: WorldEntry) -> None:
        """Judge ranks without progress, and stragglers. Raises CoordinationError."""
        if self._listed:
            self._stragglers.judge(entry.world, self.roster.with_keys())
            self._hangs.judge(entry)

    def _waits_for_registration(self, world: WorldRecord | None, now: float) -> bool:
        """Members that respond will register, unless they cannot reach the store: then the others
        do not wait for longer than for a lease."""
        limit_s = self._since_s + max(self._at.options.lease_s, ADOPTION_WAIT_S)
        return now < limit_s and bool(self.roster.unregistered(world))

    def _delete_finished(self, needed: Collection[str] = ()) -> None:
        """Delete the records of finished nodes that are gone, which have no lease, unless a
        decision needs them."""
        for node_id in self.roster.finished_and_gone():
            if node_id not in needed:
                self._at.store.delete(self._at.keys.node(node_id))

    def _view(self, entry: WorldEntry, done: Done | None, now: float) -> View:
        quarantined = self._accounting.quarantined(now)
        view = self.roster.view(entry.world, entry.since_s, done=done, quarantined=quarantined)
        return replace(
            view,
            stragglers=self._stragglers.stragglers(),
            retry_at_s=self._accounting.retry_at_s,
            quarantine_reasons=self._accounting.quarantine_reasons,
        )

    def _act(
        self, decision: Decision, entry: WorldEntry, now: float
    ) -> tuple[WorldEntry | Done | None, float]:
        match decision:
            case Proposal():
                written, again_s = self.writer.propose(decision, entry, now)
                if written is not None:
                    self._waiting_reason = ""
                return written, again_s
            case End(outcome=Outcome.FAILURE):
                # Paused for join_timeout_s. Each waiting node ends with that error; `done` is not
                # written, so that a later start under the same id continues the job.
                return None, now + RECHECK_S
            case End():
                ended = self._end(decision.outcome, decision.reason, decision.exit_code, entry)
                return ended, now + RECHECK_S
            case Wait():
                if decision.reason != self._waiting_reason:
                    self._waiting_reason = decision.reason
                    healthy = entry.world is not None and entry.world.state is WorldState.ACTIVE
                    level = logging.DEBUG if healthy else logging.INFO
                    self._at.journal.emit(Waiting(reason=decision.reason), level=level)
                soon = now + (RECHECK_S if self.roster.silent() else LEADER_IDLE_S)
                until_s = decision.until_s
                return None, soon if until_s is None else min(soon, until_s)

    def _charge(self, proposal: Proposal, view: View, entry: WorldEntry, now: float) -> Done | None:
        """Charge the breakage of the world to the job and its nodes."""
        assert entry.world is not None
        members = classify_members(view, entry.world)
        groups = [n.node.running.generation for n in members.running if n.node.running]
        broken = Broken(
            members=members,
            proposal=proposal,
            since_s=entry.since_s,
            failures=self.roster.failures_since(min([entry.world.generation, *groups])),
        )
        stop = self._accounting.charge(broken, self._at.status.step_rate, now)
        if (judged := self._accounting.verdict) is not None:
            failed, verdict = judged
            self._at.journal.emit(
                FailureJudged(
                    generation=entry.world.generation,
                    failed=failed.node,
                    action=verdict.action.value,
                    rule=verdict.rule,
                    confidence=verdict.confidence.value,
                    reason=verdict.reason,
                    evidence=verdict.evidence,
                )
            )
        return self._end(Outcome.FAILURE, stop.reason, stop.exit_code, entry) if stop else None

    def _end(self, outcome: Outcome, reason: str, exit_code: int, entry: WorldEntry) -> Done | None:
        ended = self.writer.end(outcome, reason, exit_code, entry)
        if ended is not None:
            self._delete_finished()
        return ended
