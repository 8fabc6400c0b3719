"""The election of a leader, and its succession."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastic.agent.identity import proved_gone
from elastic.agent.leader import Leadership
from elastic.agent.liveness import Connections, LivenessServer, Verdict, probe
from elastic.agent.node import LIVENESS, NodeContext
from elastic.errors import RecordError
from elastic.membership.decision import listed
from elastic.membership.records import (
    Keys,
    Leader,
    Member,
    Node,
    NodeState,
    WorldRecord,
    decode,
    encode,
)
from elastic.membership.view import Liveness
from elastic.store.keyvalue import Entry, KeyValue, Lease
from elastic.telemetry.events import LeaderChanged, Waiting
from elastic.tuning.intervals import ASK_MEMBERS_S, PROBE_S

# A follower that could not follow the leader's key retries after this.
FOLLOW_AGAIN_S = 0.5

# ----------------------------------------------------------------------------
# Leader election: which node proposes worlds. If a node wrongly believes that it is the leader,
# its compare-and-swap fails; nothing else happens.
#
# The key ``leader`` is attached to the leader's lease. A node takes it when it is absent, and
# deletes it with proof that its owner is dead. A leader outside the world hands it to a member.


@dataclass(frozen=True)
class LeaderEntry:
    """The current leader key."""

    leader: Leader
    mod_revision: int


@dataclass(frozen=True)
class LeaseOf:
    """The lease of another node, by id: leases belong to the cluster, not to the client."""

    id: int
    ttl_s: float = 0.0
    lost: bool = False
    renewed_s: float = 0.0

    def close(self, *, revoke: bool = True) -> None:
        """Does nothing: another node owns the lease."""


def may_campaign(
    awaited: Collection[str], node_id: str, *, absent_for_s: float, patience_s: float
) -> bool:
    """Nodes of the last world have priority: one of them has the newest state. Others wait
    ``patience_s`` for one of those ``awaited``, the ids of those that have not left in order."""
    return not awaited or node_id in awaited or absent_for_s >= patience_s


def campaign(store: KeyValue, keys: Keys, me: Leader, lease: Lease) -> LeaderEntry | None:
    """Take the key if it is absent."""
    revision = store.compare_and_swap(keys.leader, encode(me), expected_revision=0, lease=lease)
    return LeaderEntry(me, revision) if revision is not None else None


def evict(store: KeyValue, keys: Keys, entry: LeaderEntry) -> bool:
    """Delete the key of a leader proved dead, unless it has changed since."""
    return store.compare_and_delete(keys.leader, expected_revision=entry.mod_revision)


def hand_over(
    store: KeyValue, keys: Keys, entry: LeaderEntry, successor: Node, successor_lease_id: int
) -> LeaderEntry | None:
    """Give the key to a member, attached to that member's own lease."""
    leader = Leader(
        node_id=successor.node_id, address=successor.address, liveness_port=successor.liveness_port
    )
    revision = store.compare_and_swap(
        keys.leader,
        encode(leader),
        expected_revision=entry.mod_revision,
        lease=LeaseOf(successor_lease_id),
    )
    return LeaderEntry(leader, revision) if revision is not None else None


# ----------------------------------------------------------------------------
# This node's view of leadership: follow the leader, detect its death, succeed it.

# (The record of a finished node has no lease to which the leader's key could be attached.)
_DEPARTING = (NodeState.LEAVING, NodeState.FAILED, NodeState.FINISHED)


class Priority:
    """The nodes that a node outside of the last world lets campaign first."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._generation = 0
        self._awaited: tuple[Member, ...] = ()
        self.ask_at_s = -math.inf  # when the store is asked again

    def awaited(self, world: WorldRecord, now: float) -> tuple[Member, ...]:
        """The nodes of ``world`` that have not recorded their departure, as far as this node knows.
        Raises CoordinationError."""
        if world.generation != self._generation:
            self._generation, self._awaited = world.generation, world.tracked
            self.ask_at_s = now
        my_id = self._context.status.node.node_id
        if not self._awaited or my_id in {member.node_id for member in world.tracked}:
            self.ask_at_s = math.inf
        elif now >= self.ask_at_s:
            self.ask_at_s = now + ASK_MEMBERS_S
            self._awaited = self._without_departed(self._awaited)
        return self._awaited

    def _without_departed(self, awaited: tuple[Member, ...]) -> tuple[Member, ...]:
        # The others are listed only once this one has left: thousands of starting nodes would
        # otherwise list thousands of records twice a second.
        first = self._context.store.get(self._context.keys.node(awaited[0].node_id))
        if first is None or departed(first) is None:
            return awaited
        return without_departed(awaited, self._context.store.list(self._context.keys.nodes).entries)


def without_departed(awaited: Sequence[Member], entries: Iterable[Entry]) -> tuple[Member, ...]:
    """Those of which none of the nodes' records says that they have left."""
    left = {node_id for entry in entries if (node_id := departed(entry)) is not None}
    return tuple(member for member in awaited if member.node_id not in left)


def departed(entry: Entry) -> str | None:
    """The id of the node that wrote this record as it left, after the end of its workers. The
    record has no lease; nor has that of a finished node, which may still respond, and lead."""
    if entry.lease_id:
        return None
    try:
        node = decode(Node, entry.key, entry.value)
    except RecordError:  # of another version: its node counts as one that is still there
        return None
    return node.node_id if node.state in (NodeState.LEAVING, NodeState.FAILED) else None


@dataclass(frozen=True)
class LeaderProbed:
    """The connection to the leader closed; this is the result of the probe."""

    entry: LeaderEntry
    verdict: Verdict


class Succession:
    """Owned by the node's thread; only the probe of a leader runs elsewhere and posts back."""

    def __init__(self, context: NodeContext, liveness: LivenessServer) -> None:
        self._context = context
        self._liveness = liveness
        self._entry: LeaderEntry | None = None
        self._absent_since_s = context.clock.monotonic()
        self._priority = Priority(context)
        self._campaign_at_s: float | None = None  # the next attempt; None: none is due
        self._follow_at_s: float | None = None
        self._probing: threading.Thread | None = None
        self._reported = ""  # why this node waits for a leader
        self.connections = Connections()
        self.term: Leadership | None = None

    @property
    def _my_id(self) -> str:
        return self._context.status.node.node_id

    def learn_absent(self, revision: int | None = None) -> None:
        """The leader key is gone, deleted at ``revision`` (None: not there in a snapshot)."""
        if revision is None or self._entry is None or revision > self._entry.mod_revision:
            self._set(None)

    def learn(self, entry: Entry) -> None:
        """The leader key was written."""
        if self._entry is not None and entry.mod_revision < self._entry.mod_revision:
            return  # an older event than this node's own write
        self._set(LeaderEntry(decode(Leader, entry.key, entry.value), entry.mod_revision))

    def forget(self) -> None:
        """The store was wiped: the known leadership is void."""
        self._set(None)

    def duties(self, lease: Lease | None, now: float) -> None:
        """Campaign for an absent leader; hand over a term outside the world; follow again."""
        self._campaign_at_s = None
        if self._entry is None and lease is not None:
            self._campaign(lease, now)
        if self.term is not None:
            self._hand_over_if_outside(self.term)
        if self.term is not None:
            self._hand_over_if_cut_off(self.term, now)
        if self.term is not None:
            self._hand_over_if_unknown(self.term)
        if self._follow_at_s is not None and now >= self._follow_at_s:
            self._follow_at_s = None
            if self._entry is not None:
                leader = self._entry.leader
                self._liveness.follow(leader.node_id, leader.address, leader.liveness_port)

    @property
    def wake_s(self) -> float | None:
        """When ``duties`` must run again."""
        if self._entry is None:
            return self._campaign_at_s
        return self._follow_at_s

    @property
    def _patience_s(self) -> float:
        """A lease that must expire, and the time to obtain another one."""
        return 2 * self._context.options.lease_s

    def _campaign(self, lease: Lease, now: float) -> None:
        # A leaving node campaigns, too: the last one to leave must write that into a world.
        node, world = self._context.status.node, self._context.status.world
        awaited = self._priority.awaited(world, now) if world is not None else ()
        if not may_campaign(
            {member.node_id for member in awaited},
            node.node_id,
            absent_for_s=now - self._absent_since_s,
            patience_s=self._patience_s,
        ):
            until_s = self._absent_since_s + self._patience_s
            self._campaign_at_s = min(until_s, self._priority.ask_at_s)
            if now >= self._absent_since_s + ASK_MEMBERS_S:  # a running job elects one before that
                names = listed([member.name for member in awaited])
                self._report_wait(
                    f"there is no leader, and {names} of the last world did not leave in order: "
                    f"waiting up to {self._patience_s:g} s for their leases to expire"
                )
            return
        me = Leader(node_id=node.node_id, address=node.address, liveness_port=node.liveness_port)
        won = campaign(self._context.store, self._context.keys, me, lease)
        if won is not None:
            self._set(won)

    def _report_wait(self, reason: str) -> None:
        if reason != self._reported:
            self._reported = reason
            self._context.journal.emit(Waiting(reason=reason))

    def _set(self, entry: LeaderEntry | None) -> None:
        before = self._entry.leader.node_id if self._entry else None
        after = entry.leader.node_id if entry else None
        if entry is None and self._entry is not None:
            self._absent_since_s = self._context.clock.monotonic()
            self._priority.ask_at_s = -math.inf
        self._entry = entry
        if before == after:
            return
        self._reported = ""
        self._context.journal.emit(LeaderChanged(leader=after), level=logging.DEBUG)
        self._follow_at_s = None
        if after != self._my_id:
            self.end_term()
        if entry is None or after == self._my_id:
            self._liveness.unfollow()
        else:
            leader = entry.leader
            self._liveness.follow(leader.node_id, leader.address, leader.liveness_port)
        if after == self._my_id:
            self._begin_term()

    def _begin_term(self) -> None:
        self.end_term()
        self.term = Leadership(
            self._context, self._liveness.announce, self.connections, self._fence
        )
        world = self._context.status.world
        if world is not None:  # for followers that are cut off from the store
            self._liveness.announce(encode(world))

    def _fence(self) -> tuple[str, int]:
        """The leader's key and its revision: what this node writes as leader depends on it."""
        assert self._entry is not None
        return self._context.keys.leader, self._entry.mod_revision

    def end_term(self) -> None:
        term, self.term = self.term, None
        if term is not None:
            term.close()
            self._liveness.announce_nothing()

    def _hand_over_if_outside(self, term: Leadership) -> None:
        """A leader outside the world hands over leadership to a member."""
        world, entry = self._context.status.world, self._entry
        if world is None or entry is None or self._my_id in world.node_ids:
            return
        self._hand_over(term, entry, filter(term.roster.is_alive, world.node_ids))

    def _hand_over_if_cut_off(self, term: Leadership, now: float) -> None:
        """If most members of a broken world do not respond to the leader, although they renew their
        leases, the leader is cut off: it cannot form a world, but one of them may."""
        world, entry = self._context.status.world, self._entry
        if world is None or entry is None or self._my_id not in world.node_ids:
            return
        if not term.roster.has_failure_reports:
            return
        unresponsive = term.roster.unresponsive(world, since_s=now - self._context.options.lease_s)
        if 2 * len(unresponsive) > len(world.node_ids):
            self._hand_over(term, entry, unresponsive)

    def _hand_over_if_unknown(self, term: Leadership) -> None:
        """A leader that has never seen the world which the store has lost cannot write it back: a
        node that runs it can."""
        world, entry = term.writer.unknown_world, self._entry
        if world is None or entry is None:
            return
        # (Not yet probed: a dead one loses the key with its lease.)
        running = term.roster.nodes_that_run(world)
        self._hand_over(term, entry, (i for i in running if not term.roster.is_dead(i)))

    def _hand_over(self, term: Leadership, entry: LeaderEntry, candidates: Iterable[str]) -> None:
        """Hand over to the first candidate that is not departing."""
        for node_id in candidates:
            known = term.roster.find(node_id)
            if known is None or known.node.state in _DEPARTING:
                continue
            handed = hand_over(
                self._context.store, self._context.keys, entry, known.node, known.lease_id
            )
            if handed is not None:
                self._set(handed)
            return

    def on_connection_opened(self, node_id: str, is_leader: bool) -> None:
        """A follower completed the handshake, or this node's leader did."""
        self.connections.opened(node_id, is_leader)
        if self.term is not None and not is_leader:
            self.term.on_opened(node_id)

    def on_connection_closed(
        self, node_id: str, was_leader: bool, *, fell_silent: bool = False
    ) -> None:
        """A liveness connection closed: a suspicion, to be probed."""
        # Nobody needs to follow a node that does not lead: a follower that leaves it is not lost.
        is_expected = not was_leader and self.term is None
        self.connections.closed(node_id, was_leader, is_lost=not (fell_silent or is_expected))
        if self.term is not None:
            self.term.on_closed(node_id)
        entry = self._entry
        if not was_leader or entry is None or entry.leader.node_id != node_id:
            return
        if self._probing is not None and self._probing.is_alive():
            # Perhaps of a former leader, whose verdict says nothing about this one.
            self._follow_at_s = self._context.clock.monotonic() + FOLLOW_AGAIN_S
            return
        self._probing = threading.Thread(
            target=self._probe, args=(entry,), name="elastic-probe-leader", daemon=True
        )
        self._probing.start()

    def _probe(self, entry: LeaderEntry) -> None:
        leader, world = entry.leader, self._context.status.world
        members = world.members if world is not None else ()
        process = next((m.process for m in members if m.node_id == leader.node_id), None)
        if process is not None and proved_gone(process, self._context.status.node.process):
            verdict = Verdict(Liveness.DEAD, f"its process {process.pid} no longer exists")
        else:
            verdict = probe(
                leader.address,
                leader.liveness_port,
                leader.node_id,
                key=self._context.secret.key(LIVENESS),
                timeout_s=PROBE_S,
                tls=self._context.tls,
                clock=self._context.clock,
            )
        self._context.post(LeaderProbed(entry, verdict))

    def on_probed(self, probed: LeaderProbed, *, reaches_store: bool = True) -> None:
        """If it is dead, delete its key, so that a successor is elected at once."""
        entry, verdict = self._entry, probed.verdict
        if entry is None or entry.leader != probed.entry.leader:
            return  # (``_set`` follows the new one)
        # Silent, or refusing and never connected: its lease decides. In the meantime this
        # node tries to reconnect; likewise if its key cannot be deleted now, because it is then
        # probed again once the store responds, or if it has written its key again since.
        self._follow_at_s = self._context.clock.monotonic() + FOLLOW_AGAIN_S
        is_lost = self.connections.is_lost(entry.leader.node_id)
        is_dead = verdict.liveness is Liveness.DEAD or (verdict.refused and is_lost)
        if is_dead and reaches_store and entry == probed.entry:
            evict(self._context.store, self._context.keys, entry)
            self._set(None)
        elif verdict.liveness is not Liveness.ALIVE and self._context.status.node.running is None:
            self._report_wait(
                f"the leader at {entry.leader.address} does not respond ({verdict.reason}): "
                f"waiting up to {self._context.options.lease_s:g} s for its lease to expire"
            )

    def resign(self) -> None:
        """End the term and free the key."""
        self.end_term()
        if self._entry is not None and self._entry.leader.node_id == self._my_id:
            evict(self._context.store, self._context.keys, self._entry)

    def join_threads(self) -> None:
        if self._probing is not None:
            self._probing.join()
