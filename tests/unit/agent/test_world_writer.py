"""The leader's writes: none replaces what another leader has decided since."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import NOW, missing, node, proposal, runs, view, world
from kit.memory_store import MemoryStore

from elastic.agent.accounting import FailureAccounting
from elastic.agent.leader import Leadership, Probed, WorldWriter
from elastic.agent.liveness import Connections, Verdict
from elastic.agent.node import NodeContext, NodeStatus, RunSecret, WorldEntry
from elastic.agent.roster import NodesEvent, Roster
from elastic.membership.records import Keys, Leader, NodeState, Outcome, WorldRecord, encode
from elastic.membership.view import Liveness, Policy
from elastic.telemetry.events import NodeLost
from elastic.testing.waiting import PATIENCE_S
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")


def context_of(store: MemoryStore) -> NodeContext:
    return NodeContext(
        store=store,
        keys=KEYS,
        secret=RunSecret(SecretKey.generate(), KEYS.root),
        options=AgentOptions(),
        status=NodeStatus(node("n1"), KEYS, 0.0),
        clock=ManualClock(),
        journal=MemoryJournal(),
    )


def writer_of(context: NodeContext, leader_revision: int) -> WorldWriter:
    accounting, roster = FailureAccounting(context.options), Roster(KEYS, Connections())
    return WorldWriter(
        context, roster, accounting, lambda record: None, lambda: (KEYS.leader, leader_revision)
    )


def test_a_leader_that_was_replaced_writes_nothing_although_the_world_is_the_same() -> None:
    """It was frozen for longer than its lease: n2 is silent for it since, and trains."""
    store = MemoryStore()
    context = context_of(store)
    first = Leader(node_id="id-n1", address="10.0.0.1", liveness_port=1)
    revision = store.put(KEYS.leader, encode(first))
    writer = writer_of(context, revision)
    seven = world("n1", "n2", limits=(1, 4))
    entry = WorldEntry(seven, store.put(KEYS.world, encode(seven)), 0.0)
    alone = proposal(
        view(seven, runs("n1"), gone=[missing("n2", proved_dead=True)]),
        policy=Policy(min_nodes=1, max_nodes=4),
    )
    store.put(KEYS.leader, encode(replace(first, node_id="id-n2")))
    assert writer.propose(alone, entry, NOW)[0] is None
    assert writer.end(Outcome.SUCCESS, "n1 finished", 0, entry) is None
    store.delete(KEYS.leader)  # and where none has succeeded it yet
    assert writer.propose(alone, entry, NOW)[0] is None
    stored = store.get(KEYS.world)
    assert stored is not None and stored.mod_revision == entry.mod_revision
    assert store.get(KEYS.done) is None
    written, _ = writer_of(context, 0).propose(alone, entry, NOW)
    assert written is not None


def test_a_former_leader_does_not_end_the_job() -> None:
    """Its successor has formed a world since; only the decision of the former one is obsolete."""
    store = MemoryStore()
    context = context_of(store)
    writer = writer_of(context, leader_revision=0)
    seven, eight = world("n1", "n2", "n3"), world("n2", "n3", generation=8)
    former = WorldEntry(seven, store.put(KEYS.world, encode(seven)), 0.0)
    current = WorldEntry(eight, store.put(KEYS.world, encode(eight)), 0.0)
    assert writer.end(Outcome.FAILURE, "the budget is spent", 70, former) is None
    assert store.get(KEYS.done) is None
    assert writer.end(Outcome.SUCCESS, "all finished", 0, current) is not None
    assert store.get(KEYS.done) is not None


@contextlib.contextmanager
def term_of(context: NodeContext, store: MemoryStore, now: WorldRecord) -> Iterator[Leadership]:
    """A term as leader, which has listed the nodes."""
    term = Leadership(context, lambda record: None, Connections(), lambda: (KEYS.leader, 0))
    try:
        (listed,) = context.inbox.take(PATIENCE_S)
        assert isinstance(listed, NodesEvent)
        term.on_nodes(listed, now)
        yield term
    finally:
        term.close()
        store.close()


def test_a_former_leader_deletes_no_record_that_its_successor_needs() -> None:
    """n3 has finished in a world that the former leader does not know: without its record the next
    leader would take it for lost, and interrupt the others."""
    store = MemoryStore()
    context = context_of(store)
    seven, eight = world("n1", "n2"), world("n1", "n2", "n3", generation=8)
    former = WorldEntry(seven, store.put(KEYS.world, encode(seven)), 0.0)
    store.put(KEYS.node("id-n3"), encode(node("n3", NodeState.FINISHED)))
    for name in ("n1", "n2"):
        running = node(name, NodeState.STARTING, running=seven)
        store.put(KEYS.node(f"id-{name}"), encode(running), lease=store.lease(5.0))
    with term_of(context, store, seven) as term:
        for name, liveness in (("n1", "alive"), ("n2", "alive"), ("n3", "dead")):
            term.roster.resolve(f"id-{name}", Verdict(Liveness(liveness), ""), 1.0)
        current = WorldEntry(eight, store.put(KEYS.world, encode(eight)), 0.0)
        term.lead(former, None)
        assert store.get(KEYS.node("id-n3")) is not None
        term.lead(current, None)
        assert store.get(KEYS.node("id-n3")) is not None, "a member"
        term.lead(replace(former, mod_revision=current.mod_revision), None)
        assert store.get(KEYS.node("id-n3")) is None, "not a member"


@pytest.mark.parametrize("ended", [["n3"], ["n2", "n3"]], ids=["one", "several"])
@pytest.mark.parametrize("has_finished", [True, False], ids=["finished", "died"])
def test_a_node_that_ends_before_the_watch_has_its_last_record_is_not_lost(
    ended: list[str], has_finished: bool
) -> None:
    store = MemoryStore()
    context = context_of(store)
    running = world("n1", "n2", "n3", limits=(1, 4))
    entry = WorldEntry(running, store.put(KEYS.world, encode(running)), 0.0)
    for name in ("n1", "n2", "n3"):
        record = node(name, NodeState.STARTING, running=running)
        store.put(KEYS.node(f"id-{name}"), encode(record), lease=store.lease(5.0))
    with term_of(context, store, running) as term:
        for name in ("n1", "n2", "n3"):
            term.roster.resolve(f"id-{name}", Verdict(Liveness.ALIVE, ""), 1.0)
        for name in ended:
            if has_finished:
                store.put(KEYS.node(f"id-{name}"), encode(node(name, NodeState.FINISHED)))
            term.on_probed(Probed(f"id-{name}", Verdict(Liveness.DEAD, "refused"), 2.0))
        written, _ = term.lead(entry, None)
        for name in ended:  # a later record is a reason to probe it again
            if has_finished:
                assert f"id-{name}" in term.roster.unresolved()
                term.on_probed(Probed(f"id-{name}", Verdict(Liveness.DEAD, "refused"), 3.0))
        if has_finished:
            written, _ = term.lead(entry, None)
        assert isinstance(context.journal, MemoryJournal)
        lost = [event for event in context.journal.events if isinstance(event, NodeLost)]
        assert (written is None) == has_finished
        assert {event.lost for event in lost} == (set() if has_finished else set(ended))
