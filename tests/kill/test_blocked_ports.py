"""Nodes whose agents reach each other and etcd, but whose workers cannot form a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.network.emulated import why_unavailable
from network_job import NODES, NetworkJob

from elastic.errors import BudgetSpent
from elastic.membership.records import Node, decode
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


OUTAGE_S = 100.0
# After an outage: the longest pause between two attempts, and an attempt that began before its end.
BACK_WITHIN_S = 90.0


def block_workers(job: NetworkJob, door: int) -> None:
    """Let agents reach each other and etcd, and no worker reach another one."""
    entries = job.store.list(job.keys.nodes).entries
    nodes = [decode(Node, entry.key, entry.value) for entry in entries]
    ends = [(node.address, node.liveness_port) for node in nodes]
    job.network.block_all_but((job.network.host, door), *ends)


def block_stores(job: NetworkJob, name: str) -> None:
    """Block the ports on which rank 0 of this node hosts a world's store."""

    def record() -> Node | None:
        entries = job.store.list(job.keys.nodes).entries
        nodes = (decode(Node, entry.key, entry.value) for entry in entries)
        return next((node for node in nodes if node.name == name), None)

    node = job.wait_for(record, PATIENCE_S, f"the record of {name}")
    job.network.block(node.address, *node.ports)


@pytest.mark.slow  # the build of a group takes half a minute to give up
def test_a_job_whose_groups_cannot_be_built_ends_and_names_the_nodes(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    conf = {"failure_budget": 1, "failure_window_s": 20}
    with NetworkJob(etcd.endpoint, tmp_path, members=2, conf=conf) as job:
        first = job.start_node()
        block_stores(job, first.name)
        nodes = [first, job.start_node()]
        codes = {node.wait(3 * PATIENCE_S) for node in nodes}
        assert codes == {BudgetSpent.exit_code}, job.report()
        for node in nodes:
            log = node.log_text()
            assert "2 worlds in a row ended without a step" in log, log
            assert f"cannot reach {first.name}" in log, log
            assert "run `elastic doctor` on these nodes: all ports must be open" in log, log


@pytest.mark.slow
def test_a_job_outlives_an_outage_of_its_workers_network(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Nothing failed and nobody was lost: attempts have a pause between them and no budget."""
    defaults = {"failure_budget": 10, "quarantine_s": 60}
    with NetworkJob(etcd.endpoint, tmp_path, conf=defaults) as job:
        nodes = job.bring_to(NODES)
        with job.healed_after(OUTAGE_S) as since_s:
            block_workers(job, job.door_port)
        steps = [s.time_s for s in job.ledger().steps if s.time_s > since_s + OUTAGE_S]
        assert min(steps) < since_s + OUTAGE_S + BACK_WITHIN_S
        job.hurry()
        assert [node.wait(3 * PATIENCE_S) for node in nodes] == [0] * NODES
        job.ledger().assert_one_world_at_a_time()
