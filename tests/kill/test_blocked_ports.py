"""Nodes whose agents reach each other and etcd, but whose workers cannot form a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.network.emulated import why_unavailable
from network_job import NetworkJob

from elastic.errors import BudgetSpent
from elastic.membership.records import Node, decode
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


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
