"""The leader: probes nodes, decides on the next world, and writes it."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from elastic.agent.accounting import Broken, FailureAccounting
from elastic.agent.identity import proved_gone
from elastic.agent.judges import HangJudge, StragglerJudge
from elastic.agent.liveness import Connections, Verdict, probe
from elastic.agent.node import LIVENESS, NodeContext, WorldEntry
from elastic.agent.roster import (
    NodeRecord,
    NodesEvent,
    Roster,
    decoded,
    read,
    watched_prefixes,
)
from elastic.errors import RecordError
from elastic.membership.decision import decide, waiting_nodes, world_of
from elastic.membership.records import (
    BreakageRecord,
    Done,
    FailureReport,
    HangFacts,
    Node,
    NodeState,
    NodeStepTimes,
    Outcome,
    ProcessDigest,
    WorldRecord,
    encode,
)
from elastic.membership.view import (
    Decision,
    End,
    Liveness,
    Policy,
    Proposal,
    StepRate,
    View,
    Wait,
    all_entered,
    classify_members,
    switch_step,
)
from elastic.store.keyvalue import Deleted, Entry, Put, Reset, Watch
from elastic.telemetry.events import (
    FailureJudged,
    NodeFound,
    NodeLost,
    NodeSuspected,
    StoreProblem,
    Waiting,
    WorldFormed,
)
from elastic.tuning.intervals import PROBE_S
from elastic.wire.messages import Cause, WorldReference, WorldState

# A new leader waits this long for running worlds to be registered: longer than the cap of the
# watch's back-off (STORE_BACKOFF_CAP_S), so that after a wipe every agent has registered again.
ADOPTION_WAIT_S = 1.5
# A planned world waits this long for the first report of a step before it interrupts one, if a node
# is leaving, which has little time.
STEP_RATE_LEAVING_S = 1.0
# The same if nodes only join, which is not urgent.
STEP_RATE_JOINING_S = 5.0
# The leader checks for the report of a step this often.
STEP_RATE_AGAIN_S = 0.05
# The leader probes a silent node this often.
RECHECK_S = 0.5
# An idle leader runs again after this; changes wake it through its watch.
LEADER_IDLE_S = 5.0
# The same, before its watch has listed the nodes.
LEADER_UNLISTED_S = 1.0
# A leader rests between two turns for as long as a turn takes, and no longer than this.
LEADER_REST_S = 0.2

# ----------------------------------------------------------------------------
# Probes of the nodes whose liveness is in question, on separate threads.

_MAX_PROBES = 16  # at the same time
# Of them, of nodes that are known to be silent: each takes PROBE_S, and no decision waits for it.
_MAX_RECHECKS = 8


@dataclass(frozen=True)
class Probed:
    """A probe's verdict, posted to the service's inbox."""

    node_id: str
    verdict: Verdict
    began_s: float  # evidence since then is newer than the verdict


class Prober:
    """Probes nodes during one term as leader, one probe per node at a time; posts each verdict as
    :class:`Probed`."""

    def __init__(self, context: NodeContext, roster: Roster) -> None:
        self._context = context
        self._roster = roster
        self._in_flight: set[str] = set()
        self._next_recheck_s = 0.0
        self._threads = ThreadPoolExecutor(_MAX_PROBES, thread_name_prefix="elastic-probe")

    def close(self) -> None:
        """Wait for the probes in flight; no verdict is posted afterwards."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def on_probed(self, probed: Probed) -> None:
        """A probe has ended: the node can be probed again."""
        self._in_flight.discard(probed.node_id)

    def start_probes(self, world: WorldRecord | None, now: float) -> None:
        """Probe the suspected nodes, and periodically also those without a connection."""
        due = (self._roster.unresolved() | self._roster.unreached()) - self._in_flight
        if now >= self._next_recheck_s:
            silent = [i for i in self._roster.silent() if i not in due | self._in_flight]
            room = max(0, _MAX_RECHECKS - len(self._in_flight))
            due |= set(random.sample(silent, min(len(silent), room)))
            self._next_recheck_s = now + RECHECK_S
        members = {m.node_id: m for m in world.tracked} if world is not None else {}
        for node_id in due:
            known = self._roster.find(node_id)
            member = members.get(node_id) or (known.node.as_member() if known else None)
            if member is None:
                self._roster.resolve(node_id, Verdict(Liveness.SUSPECT, "no address"), now)
                continue
            self._in_flight.add(node_id)
            host, port, process = member.liveness_host, member.liveness_port, member.process
            self._threads.submit(self._probe, node_id, host, port, process, now)

    def _probe(
        self, node_id: str, host: str, port: int, process: ProcessDigest, began_s: float
    ) -> None:
        if proved_gone(process, self._context.status.node.process):
            verdict = Verdict(Liveness.DEAD, f"its process {process.pid} no longer exists")
        else:
            timeout_s, clock = PROBE_S, self._context.clock
            key = self._context.secret.key(LIVENESS)
            verdict = probe(
                host,
                port,
                node_id,
                key=key,
                timeout_s=timeout_s,
                tls=self._context.tls,
                clock=clock,
            )
        self._context.post(Probed(node_id, verdict, began_s))


# ----------------------------------------------------------------------------
# The leader's writes: the next world, one that the store has lost, and the job's end.
#
# Each write names the revision that it replaces, so of two concurrent leaders only one succeeds. It
# also names that of the leader's key: a leader that was frozen for longer than its lease knows
# nothing of what has happened since, although nobody may have written a world.

Fence = Callable[[], tuple[str, int]]

# How long a planned world waits for the first report of a step before it interrupts one: a leaving
# node has little time, a joining node is not urgent.
STEP_RATE_PATIENCE_S = {
    Cause.LEFT: STEP_RATE_LEAVING_S,
    Cause.JOINED: STEP_RATE_JOINING_S,
    Cause.PAUSED: STEP_RATE_LEAVING_S,  # all leave
}


class WorldWriter:
    """Writes worlds during one term. ``announce`` sends one to the followers, ahead of the store's
    watch; ``fence`` is the leader's key, and its revision in this term."""

    def __init__(
        self,
        context: NodeContext,
        roster: Roster,
        accounting: FailureAccounting,
        announce: Callable[[bytes], None],
        fence: Fence,
    ) -> None:
        self._context = context
        self._roster = roster
        self._accounting = accounting
        self._announce = announce
        self._fence = fence
        self.planned_since_s: float | None = None  # a plan waits for a step rate
        # To be written back into the store, and this node has never seen its record.
        self.unknown_world: WorldReference | None = None

    def adopt(self, entry: WorldEntry, now: float, *, since_s: float) -> WorldEntry | float:
        """After a wipe of the store, write back the highest world that any node runs.

        ``since_s`` is when the nodes began to register. Returns the current world, or the time of
        the next call.
        """
        self.unknown_world = None
        highest = self._roster.highest_running()
        generation = entry.world.generation if entry.world is not None else 0
        if highest is not None and entry.world is not None and highest.generation < generation:
            highest = entry.world  # a planned world: no node runs it yet, but others have it
        if highest is None or (entry.mod_revision and highest.generation <= generation):
            return entry
        if now < since_s + ADOPTION_WAIT_S:
            return since_s + ADOPTION_WAIT_S
        if not isinstance(highest, WorldRecord):
            # A node that runs it has its record, and is to lead (agent/succession.py), unless
            # this node's watch is only late.
            stored = self._context.store.get(self._context.keys.world)
            if (stored.mod_revision if stored is not None else 0) == entry.mod_revision:
                self.unknown_world = highest
            return now + RECHECK_S
        revision = self._context.store.compare_and_swap(
            self._context.keys.world,
            encode(highest),
            expected_revision=entry.mod_revision,
            basis=[self._fence()],
        )
        if revision is None:
            return now + RECHECK_S  # another node wrote one: the watch will deliver it
        self._context.journal.emit(
            StoreProblem(
                error="the store had lost the world",
                consequence=f"generation {highest.generation}, which is running, was restored",
            ),
            level=logging.WARNING,
        )
        return WorldEntry(highest, revision, now)

    def propose(
        self, proposal: Proposal, entry: WorldEntry, now: float
    ) -> tuple[WorldEntry | None, float]:
        """Write this world, unless it waits for a step rate or another leader was faster.

        Returns the written world, and the time of the next call.
        """
        step, wait = self._switch_step(proposal, entry.world, now)
        if wait:
            return None, now + STEP_RATE_AGAIN_S
        step_rate = self._context.status.step_rate
        world = world_of(
            proposal,
            entry.world,
            nonce=secrets.token_hex(4),
            time_s=self._context.clock.wall(),
            switch_at_step=step,
            committed_step=step_rate.step if step_rate is not None else None,
            breakages=self._breakages(),
        )
        revision = self._context.store.compare_and_swap(
            self._context.keys.world,
            encode(world),
            expected_revision=entry.mod_revision,
            basis=[self._fence()],
        )
        if revision is None:
            return None, now + RECHECK_S  # another node was faster: the watch will deliver it
        self._announce(encode(world))
        self._accounting.formed(entry.world, world, now)
        self.planned_since_s = None
        self._context.journal.emit(
            WorldFormed(
                generation=world.generation,
                nodes=tuple(m.name for m in world.members),
                size=world.size,
                state=world.state.value,
                mode="start" if world.cause is Cause.FIRST else world.mode,
                cause=world.cause.value,
                reason=world.reason,
            )
        )
        return WorldEntry(world, revision, now), now

    def _switch_step(
        self, proposal: Proposal, before: WorldRecord | None, now: float
    ) -> tuple[int | None, bool]:
        """The step at which a planned world begins (None: at once), and whether to wait for a step
        rate."""
        if not proposal.planned or before is None:
            return None, False
        if before.switch_at_step is not None and not self._switched(before):
            # A plan may replace another one that no node has executed. A node that receives it too
            # late waits at the same step boundary, while it builds the world of the first plan.
            return before.switch_at_step, False
        step_rate = self._step_rate()
        if step_rate is not None:
            return switch_step(step_rate, now), False
        if self.planned_since_s is None:
            self.planned_since_s = now
        patience_s = STEP_RATE_PATIENCE_S.get(proposal.cause, 0.0)
        return None, now < self.planned_since_s + patience_s

    def _switched(self, world: WorldRecord) -> bool:
        """Whether a member runs this world. Then all have entered it: members agree before they
        report it."""
        return any(
            known.node.running is not None and known.node.running.generation >= world.generation
            for node_id in world.node_ids
            if (known := self._roster.find(node_id)) is not None
        )

    def _step_rate(self) -> StepRate | None:
        """The step rate of this node's workers, if they are in the group that trains now."""
        running, step_rate = self._context.status.node.running, self._context.status.step_rate
        if running is None or step_rate is None or step_rate.generation != running.generation:
            return None
        return step_rate

    def end(self, outcome: Outcome, reason: str, exit_code: int, entry: WorldEntry) -> Done | None:
        """Write the job's outcome; None if it is already written, or if another leader has written
        a world since: the job goes on in that."""
        step_rate = self._context.status.step_rate
        done = Done(
            outcome=outcome,
            reason=reason,
            exit_code=exit_code,
            generation=entry.world.generation if entry.world is not None else 0,
            final_step=step_rate.step if step_rate is not None else None,
            time_s=self._context.clock.wall(),
            breakages=self._breakages() if outcome is Outcome.FAILURE else (),
        )
        revision = self._context.store.compare_and_swap(
            self._context.keys.done,
            encode(done),
            expected_revision=0,
            basis=[(self._context.keys.world, entry.mod_revision), self._fence()],
        )
        return done if revision is not None else None

    def _breakages(self) -> tuple[BreakageRecord, ...]:
        clock = self._context.clock
        return self._accounting.records(clock.monotonic(), clock.wall())


# ----------------------------------------------------------------------------
# The leader's tasks: watch the nodes, probe suspected ones, decide, write worlds.
#
# Runs on the node service's thread; only probes run elsewhere.
# Nothing is decided while a node is suspected: a probe takes milliseconds, but a world formed with
# a dead member costs a restart of all nodes.

# A node in such a state is expected to close its connection.
_EXITING = (NodeState.LEAVING, NodeState.FAILED, NodeState.FINISHED)


class Leadership:
    """One term as leader. Created on election, closed on losing leadership."""

    def __init__(
        self,
        context: NodeContext,
        announce: Callable[[bytes], None],
        connections: Connections,
        fence: Fence,
    ) -> None:
        self._context = context
        self._fence = fence
        self._policy = Policy.of(context.status.node, context.options)
        self._since_s = context.clock.monotonic()
        self.roster = Roster(context.keys, connections, context.status.node.node_id)
        self._listed = False
        self._accounting = FailureAccounting(context.options)
        self._accounting.remember(context.status.world, self._since_s, context.clock.wall())
        self._rechecked_generation = 0  # the generation whose failure made every member suspect
        self.writer = WorldWriter(context, self.roster, self._accounting, announce, fence)
        # The nodes whose probe has proved their death, until their records are read.
        self._lost: dict[str, NodeLost] = {}
        self._rests_until_s = 0.0
        self._waiting_reason = ""
        self.waiting: dict[str, str] = {}  # id of each node that is not admitted -> why
        self._prober = Prober(context, self.roster)
        self._hangs = HangJudge(context, fence)
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
        now, records, keys = self._context.clock.monotonic(), change.records, self._context.keys
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
                self.roster.put(record, entry.lease_id, now, revision=entry.mod_revision)

    def on_closed(self, node_id: str) -> None:
        """A follower's connection closed, or this node's connection to a former leader."""
        known = self.roster.find(node_id)
        if known is not None and known.node.state not in _EXITING:
            self._context.journal.emit(
                NodeSuspected(suspect=self._name(node_id), reason="its connection closed"),
                level=logging.DEBUG,
            )
        self.roster.suspect(node_id, self._context.clock.monotonic())

    def on_opened(self, node_id: str) -> None:
        """A follower completed the handshake."""
        self.roster.connection_opened(node_id, self._context.clock.monotonic())

    def on_probed(self, probed: Probed) -> None:
        """A probe has returned its verdict."""
        self._prober.on_probed(probed)
        now, reason = self._context.clock.monotonic(), probed.verdict.reason
        was_dead = self.roster.is_dead(probed.node_id)
        changed = self.roster.resolve(probed.node_id, probed.verdict, now, probed_s=probed.began_s)
        if changed is None:
            return
        name = self._name(probed.node_id)
        was_lost = was_dead and self._lost.pop(probed.node_id, None) is None
        if changed is Liveness.DEAD:
            self._lost[probed.node_id] = NodeLost(lost=name, reason=reason)
        if self.roster.has_ended(probed.node_id):
            return
        if was_lost:
            self._context.journal.emit(NodeFound(found=name, reason=reason), level=logging.WARNING)
            self._accounting.flaps.found(name)
        if changed is Liveness.SUSPECT:
            self._context.journal.emit(NodeSuspected(suspect=name, reason=reason))

    def _confirm_losses(self, now: float) -> None:
        """Read the records of the nodes that have just died. One that finished or left writes its
        record, and then ends: the watch may be later than that."""
        if not self._lost:
            return
        store, keys = self._context.store, self._context.keys
        if len(self._lost) == 1:
            entries = [store.get(keys.node(node_id)) for node_id in self._lost]
        else:
            entries = list(store.list(keys.nodes).entries)
        lost_keys = {keys.node(node_id) for node_id in self._lost}
        for entry in entries:
            if entry is not None and entry.key in lost_keys:
                self._put(entry, read(keys, entry), now)
        lost, self._lost = self._lost, {}
        for node_id, event in lost.items():
            if not self.roster.has_ended(node_id):
                self._context.journal.emit(event)
                self._accounting.flaps.lost(event.lost, now)

    def _suspect_all(self, world: WorldRecord | None, now: float) -> None:
        """Probe all nodes in a new term: one that died before it has no connection to close."""
        members = (m.node_id for m in world.tracked) if world is not None else ()
        for node_id in {*members, *self.roster.with_keys()}:
            self.roster.suspect(node_id, now)

    def _suspect_after_failure(self, key: str, world: WorldRecord | None, now: float) -> None:
        """A member failed, or its collectives did: possibly because another one died.

        One round for each generation: hundreds of nodes report the same failure at once.
        """
        keys = self._context.keys
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
        self._context.journal.emit(
            StoreProblem(error=str(error), consequence="this node is excluded"),
            level=logging.ERROR,
        )

    def _name(self, node_id: str) -> str:
        known = self.roster.find(node_id)
        return known.node.name if known is not None else node_id

    # ── decisions ────────────────────────────────────────────────────────────────────────

    def lead(self, entry: WorldEntry, done: Done | None) -> tuple[WorldEntry | Done | None, float]:
        """Decide and write. Returns the written world (or None), and the time of the next call."""
        now = self._context.clock.monotonic()
        if not self._listed:
            return None, now + LEADER_UNLISTED_S
        if now < self._rests_until_s:
            return None, self._rests_until_s
        self.roster.learn_worlds(self._context.status.known_worlds)
        entry_or_wait = self.writer.adopt(entry, now, since_s=self._since_s)
        if isinstance(entry_or_wait, float):
            return None, entry_or_wait
        if entry_or_wait is not entry:
            return entry_or_wait, now
        world = entry.world
        self.roster.suspect_members_without_key(world, now)
        self.roster.forget_non_members(world)
        self._prober.start_probes(world, now)
        self._confirm_losses(now)
        if self.roster.unresolved() or self._waits_for_registration(world, now):
            if len(self.roster.unresolved()) > _MAX_PROBES:
                self._rest(now)
            return None, now + RECHECK_S
        self._delete_ended(entry, world)
        self._accounting.observe(self._context.status.step_rate)
        began_s = self._context.clock.monotonic()
        view = self._view(entry, done, now)
        self.waiting = waiting_nodes(view, now, self._policy)
        decision = decide(view, now, self._policy)
        if isinstance(decision, Proposal) and world is not None:
            ended = self._count(decision, view, entry, now)
            if ended is not None:
                return ended, now + RECHECK_S
            # The count may have quarantined a node, which is then excluded at once.
            decision = decide(self._view(entry, done, now), now, self._policy)
        self._rest(began_s)
        return self._act(decision, entry, now)

    def _rest(self, began_s: float) -> None:
        """Decide nothing for as long as this took. It takes longer with more nodes: a turn for each
        that arrives would keep the threads that receive and probe them from running."""
        now = self._context.clock.monotonic()
        self._rests_until_s = now + min(now - began_s, LEADER_REST_S)

    def judge(self, entry: WorldEntry) -> None:
        """Judge ranks without progress, and stragglers. Raises CoordinationError."""
        if self._listed:
            self._stragglers.judge(entry.world, self.roster.with_keys())
            self._hangs.judge(entry)

    def _waits_for_registration(self, world: WorldRecord | None, now: float) -> bool:
        """Members that respond will register, unless they cannot reach the store: then the others
        do not wait for longer than for a lease."""
        limit_s = self._since_s + max(self._context.options.lease_s, ADOPTION_WAIT_S)
        return now < limit_s and bool(self.roster.unregistered(world))

    def _delete_ended(
        self, entry: WorldEntry, world: WorldRecord | None, *, is_over: bool = False
    ) -> None:
        """Delete the records of nodes that have finished or left and are gone, which have no lease,
        unless a decision needs them: also one of a later leader, on a world that this one does not
        know."""
        keys = self._context.keys
        for node_id in self.roster.unneeded(world, is_over=is_over):
            self._context.store.compare_and_delete(
                keys.node(node_id),
                expected_revision=None,
                basis=[(keys.world, entry.mod_revision), self._fence()],
            )

    def _view(self, entry: WorldEntry, done: Done | None, now: float) -> View:
        quarantined = self._accounting.flaps.quarantined(now)
        view = self.roster.view(entry.world, entry.since_s, done=done, quarantined=quarantined)
        status = self._context.status
        steps = entry.world and status.stepping_generation == entry.world.generation
        if steps and status.steps_in_process:
            view = all_entered(view)
        return replace(
            view,
            stopped=self._context.status.stopped,
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
            case End(is_final=False):
                # Paused for join_timeout_s. Each waiting node ends with that error.
                return None, now + RECHECK_S
            case End():
                ended = self._end(decision.outcome, decision.reason, decision.exit_code, entry)
                return ended, now + RECHECK_S
            case Wait():
                if decision.reason != self._waiting_reason:
                    self._waiting_reason = decision.reason
                    healthy = entry.world is not None and entry.world.state is WorldState.ACTIVE
                    level = logging.DEBUG if healthy else logging.INFO
                    self._context.journal.emit(Waiting(reason=decision.reason), level=level)
                soon = now + (RECHECK_S if self.roster.silent() else LEADER_IDLE_S)
                until_s = decision.until_s
                return None, soon if until_s is None else min(soon, until_s)

    def _count(self, proposal: Proposal, view: View, entry: WorldEntry, now: float) -> Done | None:
        """Count the breakage of the world to the job and its nodes."""
        assert entry.world is not None
        members = classify_members(view, entry.world)
        groups = [n.node.running.generation for n in members.running if n.node.running]
        broken = Broken(
            members=members,
            proposal=proposal,
            since_s=entry.since_s,
            failures=self.roster.failures_since(min([entry.world.generation, *groups])),
        )
        stop = self._accounting.count(broken, self._context.status.step_rate, now)
        if (judged := self._accounting.verdict) is not None:
            failed, verdict = judged
            self._context.journal.emit(
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
            self._delete_ended(entry, None, is_over=True)
            # The job's other keys are those that a node needs to learn of its end, or on leases.
            for key in (self._context.keys.replicas, self._context.keys.hang_verdict):
                self._context.store.delete(key)
        return ended
