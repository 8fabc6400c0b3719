"""Machines lose their network, and no connection is closed. The others continue; an isolated
machine rejoins and receives their state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import networks
import pytest
from etcd_proxy import CuttingProxy
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode

pytestmark = [
    pytest.mark.skipif(
        not networks.available(), reason="network namespaces need root, and `ip` of iproute2"
    ),
]

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=500, epochs=6, step_s=0.5)
LEASE_S = 3.0


class Machines:
    """A job with a machine for each node."""

    def __init__(self, job: TrainingJob, network: networks.Network, etcd: str) -> None:
        self.job = job
        self._network = network
        self._etcd = etcd
        self._of: dict[str, networks.Machine] = {}

    def start(self) -> None:
        for machine in self._network.machines:
            node = self.job.start_node(
                endpoints=[self._etcd],
                launcher=machine.launcher,
                address=machine.address,
            )
            self._of[node.name] = machine

    def machine(self, node: LocalNode) -> networks.Machine:
        return self._of[node.name]


@pytest.fixture
def machines(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Machines]:
    with (
        networks.Network(3) as network,
        CuttingProxy(etcd.endpoint, network.host) as door,
        TrainingJob(
            [etcd.endpoint],
            tmp_path,
            script=SCRIPT,
            workload=WORKLOAD,
            min_nodes=2,
            max_nodes=3,
            conf={"lease_s": LEASE_S},
        ) as job,
    ):
        yield Machines(job, network, door.endpoint)


def pids(job: TrainingJob, but: LocalNode) -> dict[str, int]:
    return {node.name: node.workers()[0].pid for node in job.running if node is not but}


def test_machines_that_lose_the_network_rejoin(
    machines: Machines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = machines.job
    machines.start()
    generation = job.wait_training(nodes=3)

    def bystander() -> LocalNode:
        return next(n for n in job.running if n not in (job.leader(), job.node_of_rank(0)))

    for find in (bystander, job.leader):
        who = find()
        machine = machines.machine(who)
        others = pids(job, but=who)
        machine.cut()
        generation = job.wait_training(nodes=2, after_generation=generation)
        assert who.name not in job.training_nodes()[1]
        machine.restore()
        generation = job.wait_training(nodes=3, after_generation=generation)
        assert who.running
        assert pids(job, but=who) == others
    reference = train_undisturbed(tmp_path_factory.mktemp("alone"), WORKLOAD, SCRIPT)
    job.assert_finishes_whole(reference)
