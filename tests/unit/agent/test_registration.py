"""A node's record in the store: of the run whose secret it has, whatever is deleted meanwhile."""

from __future__ import annotations

from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world
from kit.memory_store import MemoryServer, MemoryStore

from elastic.agent.node import LIVENESS, NodeContext, NodeStatus, RunSecret, WorldEntry
from elastic.agent.service import Registration
from elastic.cli.forget import forget
from elastic.membership.records import Keys, NodeState
from elastic.tuning.options import AgentOptions

KEYS = Keys.of("/elastic", "job")


class RegisteredNode:
    """n1, which has a lease and a record."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self.context = NodeContext(
            store=self.store,
            keys=KEYS,
            secret=RunSecret.obtain(self.store, KEYS),
            options=AgentOptions(),
            status=NodeStatus(node("n1"), KEYS, 0.0),
            clock=ManualClock(),
            journal=MemoryJournal(),
        )
        self.registration = Registration(self.context, lambda: None)
        self.registration.write()

    def lose_lease(self) -> None:
        """As after the agent was frozen."""
        assert self.registration.lease is not None
        self.server.expire(self.registration.lease.id)

    def agrees_with_a_later_node(self) -> bool:
        later = RunSecret.obtain(MemoryStore(self.server), KEYS)
        return later.key(LIVENESS) == self.context.secret.key(LIVENESS)


def test_a_node_whose_jobs_keys_are_deleted_as_it_registers_restores_the_secret() -> None:
    """Otherwise the next node would create another one, and neither would reach the other."""
    one = RegisteredNode()
    lease = one.registration.lease
    assert lease is not None
    one.store.delete(KEYS.node("id-n1"))
    assert forget(one.store, KEYS) == 1  # between the grant of the lease and the record
    one.registration.expire()
    one.registration.write()
    assert one.registration.lease is lease
    assert {e.key for e in one.store.list(KEYS.root).entries} == {KEYS.node("id-n1"), KEYS.secret}
    assert one.agrees_with_a_later_node()


def test_a_node_that_leaves_a_job_without_keys_leaves_no_record() -> None:
    one = RegisteredNode()
    one.context.status.set_world(WorldEntry(world("n1", "n2"), 1, 0.0))
    one.context.status.change_node(lambda _: node("n1", NodeState.LEAVING))
    one.lose_lease()
    assert forget(one.store, KEYS) == 1
    one.registration.withdraw(have_workers_ended=True)
    assert one.store.list(KEYS.root).entries == ()


def test_a_node_that_leaves_a_job_leaves_a_record_without_a_lease() -> None:
    one = RegisteredNode()
    one.context.status.set_world(WorldEntry(world("n1", "n2"), 1, 0.0))
    one.context.status.change_node(lambda _: node("n1", NodeState.LEAVING))
    one.registration.withdraw(have_workers_ended=True)
    entry = one.store.get(KEYS.node("id-n1"))
    assert entry is not None and not entry.lease_id
