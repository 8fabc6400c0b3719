"""What the leader does: watch the nodes, ask the doubtful ones, decide, write worlds.

Runs on the node service's thread; only probes run elsewhere, and report back as
:class:`Probed`. Nothing is decided while a node is in question: a probe takes milliseconds, a
world formed with a dead member costs a restart of everybody.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic.agent.board import WorldEntry
from elastic.agent.context import NodeContext
from elastic.agent.identity import proved_gone
from elastic.agent.probe import Verdict, probe
from elastic.agent.roster import RECHECK_S, Roster
from elastic.coordination.keyvalue import Deleted, Entry, Put, Reset, Watch, WatchEvent
from elastic.coordination.membership import (
    Decision,
    End,
    Liveness,
    Proposal,
    Wait,
    decide,
)
from elastic.coordination.records import (
    Cause,
    Done,
    Node,
    NodeState,
    Outcome,
    ProcessIdentity,
    World,
    WorldState,
    encode,
)
from elastic.errors import RecordError
from elastic.events import NodeLost, NodeSuspected, StoreTrouble, Waiting, WorldFormed
from elastic.health import budget

# Longer than the watch's reconnect back-off cap (1 s): after a wipe every agent has
# registered again by then, so the highest running world is known.
ADOPTION_WAIT_S = 1.5
LINEAGE_KEPT = 32


@dataclass(frozen=True)
class Probed:
    """A probe's verdict, on its way to the service's inbox."""

    node_id: str
    verdict: Verdict


@dataclass(frozen=True)
class NodesEvent:
    """Something changed under ``nodes/``."""

    event: WatchEvent


class Leadership:
    """One term as leader. Made on taking office, closed on losing it."""

    def __init__(self, context: NodeContext, announce: Callable[[bytes], None]) -> None:
        self._at = context
        self._announce = announce
        self._since_s = context.clock.monotonic()
        self.roster = Roster(context.keys)
        self._listed = False
        self._asked: set[str] = set()
        self._next_recheck_s = 0.0
        self._breakages: list[budget.Breakage] = []
        self._flaps = budget.FlapTracker()
        self._waiting_reason = ""
        self._probes = ThreadPoolExecutor(max_workers=16, thread_name_prefix="elastic-probe")
        self._watch: Watch = context.store.watch(
            [context.keys.nodes],
            lambda event: context.post(NodesEvent(event)),
            name="elastic-watch-nodes",
        )

    def close(self) -> None:
        """End the term: no callback afterwards."""
        self._watch.close()
        self._probes.shutdown(wait=True, cancel_futures=True)

    # ── what comes in ────────────────────────────────────────────────────────────────────

    def on_nodes(self, event: WatchEvent, world: World | None) -> None:
        """An event of the watch on ``nodes/``."""
        now = self._at.clock.monotonic()
        match event:
            case Reset(snapshot, reason):
                if reason == "wiped":
                    self._since_s = now
                self._listed = True
                for error in self.roster.reset(snapshot.entries, now):
                    self._report_record(error)
                self._doubt_all(world, now)
            case Put(entry):
                error_or_none = self.roster.put(entry, now)
                if error_or_none is not None:
                    self._report_record(error_or_none)
                self._doubt_after_failure(entry.key, world, now)
            case Deleted(key):
                self.roster.delete(key.removeprefix(self._at.keys.nodes), now)
            case _:
                pass

    def on_own_record(self, node: Node, lease_id: int) -> None:
        """This node's own record, without waiting for the watch to bring it round."""
        if self._listed:
            entry = Entry(self._at.keys.node(node.node_id), encode(node), 0, lease_id)
            self.roster.put(entry, self._at.clock.monotonic())

    def on_closed(self, node_id: str) -> None:
        """A follower's connection closed."""
        self._at.journal.emit(
            NodeSuspected(suspect=self._name(node_id), reason="its connection closed"),
            level=logging.DEBUG,
        )
        self.roster.doubt(node_id, self._at.clock.monotonic())

    def on_probed(self, probed: Probed) -> None:
        """A verdict arrived."""
        self._asked.discard(probed.node_id)
        verdict = probed.verdict
        changed = self.roster.settle(probed.node_id, verdict.liveness, self._at.clock.monotonic())
        if not changed:
            return
        name = self._name(probed.node_id)
        if verdict.liveness is Liveness.DEAD:
            self._at.journal.emit(NodeLost(lost=name, reason=verdict.reason))
            self._flaps.lost(name, self._at.clock.monotonic())
        elif verdict.liveness is Liveness.SUSPECT:
            self._at.journal.emit(NodeSuspected(suspect=name, reason=verdict.reason))

    def _doubt_all(self, world: World | None, now: float) -> None:
        """A new term: whoever died before it, member or not, left no connection to close."""
        members = world.node_ids if world is not None else ()
        for node_id in {*members, *self.roster.with_keys()}:
            self.roster.doubt(node_id, now)

    def _doubt_after_failure(self, key: str, world: World | None, now: float) -> None:
        known = self.roster.knows(key.removeprefix(self._at.keys.nodes))
        if known is None or world is None or known.node.node_id not in world.node_ids:
            return
        node = known.node
        if node.state is NodeState.ARRIVED and node.arrived_for >= world.generation:
            self.roster.doubt_others(world, node.node_id, now)

    def _report_record(self, error: RecordError) -> None:
        self._at.journal.emit(
            StoreTrouble(error=str(error), consequence="this node is left out"),
            level=logging.ERROR,
        )

    def _name(self, node_id: str) -> str:
        known = self.roster.knows(node_id)
        return known.node.name if known is not None else node_id

    # ── what goes out ────────────────────────────────────────────────────────────────────

    def lead(self, entry: WorldEntry, done: Done | None) -> tuple[WorldEntry | Done | None, float]:
        """Decide and write. Returns what was written (or None), and when to be called again."""
        now = self._at.clock.monotonic()
        if not self._listed:
            return None, now + 1.0
        entry_or_wait = self._adopt(entry, now)
        if isinstance(entry_or_wait, float):
            return None, entry_or_wait
        if entry_or_wait is not entry:
            return entry_or_wait, now
        world = entry.world
        self.roster.doubt_members_without_key(world, now)
        self.roster.forget_strangers(world)
        self._ask(world, now)
        if self.roster.unsettled() or self.roster.unregistered(world):
            return None, now + RECHECK_S
        cooling = self._flaps.cooling(now)
        view = self.roster.view(world, entry.since_s, done=done, cooling=cooling)
        return self._act(decide(view, now, self._at.policy), entry, now)

    def _adopt(self, entry: WorldEntry, now: float) -> WorldEntry | float:
        """After a wipe: the highest world that any node runs goes back into the store."""
        highest = self.roster.highest_running()
        generation = entry.world.generation if entry.world is not None else 0
        if highest is None or (entry.mod_revision and highest.generation <= generation):
            return entry
        if now < self._since_s + ADOPTION_WAIT_S:
            return self._since_s + ADOPTION_WAIT_S
        revision = self._at.store.compare_and_swap(
            self._at.keys.world, encode(highest), expected_revision=entry.mod_revision
        )
        if revision is None:
            return now + RECHECK_S  # somebody else wrote one: the watch will tell
        self._at.journal.emit(
            StoreTrouble(
                error="the store had lost the world",
                consequence=f"generation {highest.generation}, which is running, was put back",
            ),
            level=logging.WARNING,
        )
        return WorldEntry(highest, revision, now)

    def _ask(self, world: World | None, now: float) -> None:
        due = set(self.roster.unsettled())
        if now >= self._next_recheck_s:
            due.update(self.roster.silent())
            self._next_recheck_s = now + RECHECK_S
        members = {m.node_id: m for m in world.members} if world is not None else {}
        for node_id in due - self._asked:
            known = self.roster.knows(node_id)
            member = members.get(node_id) or (known.node.as_member() if known else None)
            if member is None:
                self.roster.settle(node_id, Liveness.SUSPECT, now)
                continue
            self._asked.add(node_id)
            self._probes.submit(
                self._probe, node_id, member.liveness_host, member.liveness_port, member.process
            )

    def _probe(self, node_id: str, host: str, port: int, process: ProcessIdentity) -> None:
        if proved_gone(process, self._at.board.node.process):
            verdict = Verdict(Liveness.DEAD, f"its process {process.pid} no longer exists")
        else:
            timeout_s, clock = self._at.options.probe_s, self._at.clock
            verdict = probe(host, port, node_id, timeout_s=timeout_s, clock=clock)
        self._at.post(Probed(node_id, verdict))

    def _act(
        self, decision: Decision, entry: WorldEntry, now: float
    ) -> tuple[WorldEntry | Done | None, float]:
        match decision:
            case Proposal():
                return self._propose(decision, entry, now)
            case End(outcome=Outcome.FAILURE):
                # Paused for join_timeout_s. Each node that waits ends with that error by itself;
                # `done` is not written, so that a later start under the same id goes on.
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
                soon = now + RECHECK_S if self.roster.silent() else now + 5.0
                until_s = decision.until_s
                return None, soon if until_s is None else min(soon, until_s)

    def _propose(
        self, proposal: Proposal, entry: WorldEntry, now: float
    ) -> tuple[WorldEntry | Done | None, float]:
        ended = self._spend_budget(proposal, entry, now)
        if ended is not None:
            return ended, now + RECHECK_S
        world = self._next_world(proposal, entry.world)
        revision = self._at.store.compare_and_swap(
            self._at.keys.world, encode(world), expected_revision=entry.mod_revision
        )
        if revision is None:
            return None, now + RECHECK_S  # somebody else was faster: the watch will tell
        self._announce(encode(world))
        self._waiting_reason = ""
        self._at.journal.emit(
            WorldFormed(
                generation=world.generation,
                nodes=tuple(m.name for m in world.members),
                size=world.size,
                state=world.state.value,
                mode=world.mode,
                cause=world.cause.value,
                reason=world.reason,
            )
        )
        return WorldEntry(world, revision, now), now

    def _spend_budget(self, proposal: Proposal, entry: WorldEntry, now: float) -> Done | None:
        """Failures with everyone alive are the job's own; the loss of nodes is not its fault."""
        world = entry.world
        if world is None or proposal.cause is not Cause.TROUBLE:
            return None
        failures = self.roster.failures_in(world.generation)
        if failures:
            self._flaps.accused(failures[0].node, now)
        self._breakages.append(
            budget.Breakage(
                generation=world.generation,
                lived_s=now - entry.since_s,
                failures=tuple(budget.Failure(f.node, f.text, f.exit_code) for f in failures),
                lost=(),
                at_s=now,
            )
        )
        verdict = budget.verdict(self._breakages, now, self._budget_policy())
        if verdict is None:
            return None
        return self._end(Outcome.FAILURE, verdict.reason, verdict.exit_code, entry)

    def _budget_policy(self) -> budget.BudgetPolicy:
        options = self._at.options
        return budget.BudgetPolicy(
            budget=options.failure_budget,
            failure_window_s=options.failure_window_s,
            healthy_s=options.healthy_s,
        )

    def _next_world(self, proposal: Proposal, before: World | None) -> World:
        generation = before.generation + 1 if before is not None else 1
        first = proposal.nodes[0] if proposal.nodes else None
        lineage = (*before.lineage, before.generation)[-LINEAGE_KEPT:] if before else ()
        return World(
            generation=generation,
            members=tuple(n.as_member() for n in proposal.nodes),
            store_host=first.address if first else "",
            store_port=first.ports[generation % len(first.ports)] if first else 0,
            nonce=secrets.token_hex(4),
            mode=proposal.mode,
            switch_at_step=None,
            state=proposal.state,
            min_nodes=first.min_nodes if first else self._at.policy.min_nodes,
            max_nodes=first.max_nodes if first else self._at.policy.max_nodes,
            lineage=lineage,
            cause=proposal.cause,
            reason=proposal.reason,
            time_s=self._at.clock.wall(),
            committed_step=before.committed_step if before else None,
            library=first.library if first else (before.library if before else ""),
        )

    def _end(self, outcome: Outcome, reason: str, exit_code: int, entry: WorldEntry) -> Done | None:
        done = Done(
            outcome=outcome,
            reason=reason,
            exit_code=exit_code,
            generation=entry.world.generation if entry.world is not None else 0,
            final_step=None,
            time_s=self._at.clock.wall(),
        )
        revision = self._at.store.compare_and_swap(
            self._at.keys.done, encode(done), expected_revision=0
        )
        return done if revision is not None else None
