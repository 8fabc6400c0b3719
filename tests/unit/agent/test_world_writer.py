"""The leader's writes: none replaces what another leader has decided since."""

from __future__ import annotations

from dataclasses import replace

from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore

from elastic.agent.accounting import FailureAccounting
from elastic.agent.leader import Leadership, WorldWriter
from elastic.agent.liveness import Connections, Verdict
from elastic.agent.node import NodeContext, NodeStatus, RunSecret, WorldEntry
from elastic.agent.roster import NodesEvent, Roster
from elastic.membership.records import Keys, NodeState, Outcome, encode
from elastic.membership.view import Liveness
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


def test_a_former_leader_does_not_end_the_job() -> None:
    """Its successor has formed a world since; only the decision of the former one is obsolete."""
    store = MemoryStore()
    context = context_of(store)
    accounting = FailureAccounting(context.options)
    writer = WorldWriter(context, Roster(KEYS, Connections()), accounting, lambda record: None)
    seven, eight = world("n1", "n2", "n3"), world("n2", "n3", generation=8)
    former = WorldEntry(seven, store.put(KEYS.world, encode(seven)), 0.0)
    current = WorldEntry(eight, store.put(KEYS.world, encode(eight)), 0.0)
    assert writer.end(Outcome.FAILURE, "the budget is spent", 70, former) is None
    assert store.get(KEYS.done) is None
    assert writer.end(Outcome.SUCCESS, "all finished", 0, current) is not None
    assert store.get(KEYS.done) is not None


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
    term = Leadership(context, lambda record: None, Connections())
    try:
        (listed,) = context.inbox.take(PATIENCE_S)
        assert isinstance(listed, NodesEvent)
        term.on_nodes(listed, seven)
        for name, liveness in (("n1", "alive"), ("n2", "alive"), ("n3", "dead")):
            term.roster.resolve(f"id-{name}", Verdict(Liveness(liveness), ""), 1.0)
        current = WorldEntry(eight, store.put(KEYS.world, encode(eight)), 0.0)
        term.lead(former, None)
        assert store.get(KEYS.node("id-n3")) is not None
        term.lead(current, None)
        assert store.get(KEYS.node("id-n3")) is not None, "a member"
        term.lead(replace(former, mod_revision=current.mod_revision), None)
        assert store.get(KEYS.node("id-n3")) is None, "not a member"
    finally:
        term.close()
        store.close()
