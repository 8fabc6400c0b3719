"""Machines with several interfaces, the first of which is not connected: NCCL and gloo use the one
on the route to the leader, whatever the machine's host name resolves to.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import networks
import pytest
from etcd_proxy import CuttingProxy
from training_job import TrainingJob, Workload

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not networks.available(), reason="network namespaces need root, and `ip` of iproute2"
    ),
]


def variables(node: LocalNode) -> dict[str, str]:
    """The network variables in the environment of its first worker."""
    text = Path(f"/proc/{node.workers()[0].pid}/environ").read_bytes().decode()
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, _, value in pairs}


def test_a_job_uses_the_interface_on_the_route_to_its_leader(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Neither an address for the nodes nor an interface for gloo is configured. A node that joins
    later learns the leader's address from the running world. A node with an unknown interface is
    rejected before it contacts etcd.
    """
    with (
        networks.Network(3, has_decoy=True) as network,
        CuttingProxy(etcd.endpoint, network.host) as door,
        TrainingJob([etcd.endpoint], tmp_path, workload=Workload(epochs=2), max_nodes=3) as job,
    ):
        first, second, third = network.machines

        def start(machine: networks.Machine, **env: str) -> LocalNode:
            return job.start_node(
                endpoints=[door.endpoint], launcher=machine.launcher, address="", env=env
            )

        start(first)
        start(second)
        generation = job.wait_training(nodes=2)
        refused = start(third, GLOO_SOCKET_IFNAME="ib7")
        assert refused.wait(PATIENCE_S) == 2
        assert "GLOO_SOCKET_IFNAME (environment)=ib7" in refused.log_text()
        assert networks.DECOY in refused.log_text()
        start(third)
        job.wait_training(nodes=3, after_generation=generation)
        for node in job.running:
            told = variables(node)
            assert told["GLOO_SOCKET_IFNAME"] == networks.INTERFACE
            assert told["NCCL_SOCKET_IFNAME"] == f"={networks.INTERFACE}"
            assert "GLOO_SOCKET_IFNAME" in told["ELASTIC_TUNED"].split(",")
        job.hurry()
        job.wait_ended()
        tuned = [e for e in read_journal(tmp_path / "journal") if e["event"] == "workers-tuned"]
        assert {e["interface"] for e in tuned} == {networks.INTERFACE}
        assert any("on the route to" in e["interface_reason"] for e in tuned)


@pytest.mark.skipif(shutil.which("tc") is None, reason="needs `tc` of iproute2")
def test_the_store_and_state_transfers_use_the_configured_network(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """The same setting on both nodes, whose route to etcd is slow."""
    with (
        networks.Network(2) as network,
        CuttingProxy(etcd.endpoint, network.host) as door,
        TrainingJob(
            [etcd.endpoint], tmp_path, workload=Workload(epochs=2), min_nodes=2, max_nodes=2
        ) as job,
    ):
        one, other = network.machines
        addresses = networks.add_fast_link(one, other, slow_mbit=2)
        env = {"ELASTIC_NETWORK": networks.FAST_NETWORK}
        for machine in (one, other):
            job.start_node(
                endpoints=[door.endpoint], launcher=machine.launcher, address="", env=env
            )
        job.wait_training(nodes=2)
        for node in job.running:
            told = variables(node)
            assert told["GLOO_SOCKET_IFNAME"] == networks.FAST
            assert told["MASTER_ADDR"] in addresses, "the group's store"
        world = job.world()
        assert world is not None
        assert {m.liveness_host for m in world.members} == set(addresses)
        job.hurry()
        job.wait_ended()
