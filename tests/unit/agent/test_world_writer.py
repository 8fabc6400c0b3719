"""The leader's writes: none replaces what another leader has decided since."""

from __future__ import annotations

from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore

from elastic.agent.accounting import FailureAccounting
from elastic.agent.leader import WorldWriter
from elastic.agent.liveness import Connections
from elastic.agent.node import NodeContext, NodeStatus, RunSecret, WorldEntry
from elastic.agent.roster import Roster
from elastic.membership.records import Keys, Outcome, encode
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")


def test_a_former_leader_does_not_end_the_job() -> None:
    """Its successor has formed a world since; only the decision of the former one is obsolete."""
    store = MemoryStore()
    context = NodeContext(
        store=store,
        keys=KEYS,
        secret=RunSecret(SecretKey.generate(), KEYS.root),
        options=AgentOptions(),
        status=NodeStatus(node("n1"), KEYS, 0.0),
        clock=ManualClock(),
        journal=MemoryJournal(),
    )
    accounting = FailureAccounting(context.options)
    writer = WorldWriter(context, Roster(KEYS, Connections()), accounting, lambda record: None)
    seven, eight = world("n1", "n2", "n3"), world("n2", "n3", generation=8)
    former = WorldEntry(seven, store.put(KEYS.world, encode(seven)), 0.0)
    current = WorldEntry(eight, store.put(KEYS.world, encode(eight)), 0.0)
    assert writer.end(Outcome.FAILURE, "the budget is spent", 70, former) is None
    assert store.get(KEYS.done) is None
    assert writer.end(Outcome.SUCCESS, "all finished", 0, current) is not None
    assert store.get(KEYS.done) is not None
