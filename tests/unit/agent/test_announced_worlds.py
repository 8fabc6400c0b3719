"""What an agent sends to its workers of a world's record in etcd."""

from __future__ import annotations

from dataclasses import fields, replace

from kit.membership_nodes import node, world
from kit.memory_store import MemoryServer, MemoryStore

from elastic.agent.node import STORE, NodeContext, RunSecret
from elastic.agent.workers import assign
from elastic.link.link import Assignment, Leave, Worker, decode, encode
from elastic.membership.records import Keys, NodeState, WorldRecord
from elastic.telemetry.journal import Journal
from elastic.tuning.options import AgentOptions
from elastic.wire.messages import WorldState

KEYS = Keys.of("/elastic", "job")
SECOND_WORKER = Worker(pid=11, local_rank=1, token=0)


def of_two_workers(record: WorldRecord) -> WorldRecord:
    return replace(record, members=tuple(replace(m, nproc=2) for m in record.members))


BEFORE = of_two_workers(world("n1", "n2", "n3", generation=7, mode="in-process"))
PLANNED = of_two_workers(
    replace(
        world("n1", "n2", generation=8, mode="in-process", state=WorldState.PAUSED),
        switch_at_step=30,
        committed_step=29,
    )
)


def agent(name: str, running: WorldRecord | None) -> NodeContext:
    store = MemoryStore(MemoryServer())
    return NodeContext.of(
        replace(node(name, NodeState.READY, running=running), nproc=2),
        store=store,
        keys=KEYS,
        secret=RunSecret.obtain(store, KEYS),
        options=AgentOptions(),
        journal=Journal(folder=None, identity={}, role="agent", run_id="job"),
    )


def test_a_worker_of_a_member_gets_the_records_facts_and_its_ranks() -> None:
    at = agent("n2", BEFORE)
    assigned = assign(at, PLANNED, SECOND_WORKER)
    assert decode(encode(assigned)) == assigned
    assert isinstance(assigned, Assignment)
    facts = {f.name for f in fields(Assignment)} & {f.name for f in fields(WorldRecord)}
    assert {name: getattr(assigned, name) for name in facts} == {
        "generation": 8,
        "nonce": "ab",
        "lineage": (5, 6),
        "store_host": "10.0.0.1",
        "store_port": 5001,
        "switch_at_step": 30,
        "state": WorldState.PAUSED,
        "committed_step": 29,
    }
    assert (assigned.rank, assigned.size) == (3, 4)
    assert (assigned.local_rank, assigned.local_size) == (1, 2)
    assert (assigned.node_rank, assigned.nodes, assigned.nodes_leaving) == (1, 2, 1)
    assert assigned.store_key == at.secret.key(STORE).text and assigned.store_tls is None


def test_a_worker_of_another_node_gets_no_key_of_the_worlds_store() -> None:
    leave = assign(agent("n3", BEFORE), PLANNED, SECOND_WORKER)
    assert leave == Leave(generation=8, nodes=2, nodes_leaving=1, switch_at_step=30)


def test_a_world_of_the_other_mode_is_entered_by_new_processes() -> None:
    restarts = replace(PLANNED, mode="restart")
    assert isinstance(assign(agent("n2", BEFORE), restarts, SECOND_WORKER), Leave)
    assert isinstance(assign(agent("n2", restarts), restarts, SECOND_WORKER), Assignment)
