"""etcd is 300 ms away, as in another region: a job starts, trains, and recovers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kit.network.emulated import why_unavailable
from network_job import NODES, SCRIPT, WORKLOAD, NetworkJob
from training_job import train_undisturbed

from elastic.store.embedded import EmbeddedEtcd

WHY_NOT = why_unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

ONE_WAY_S = 0.3  # a round trip takes twice as long, and the first connection several of them


def test_a_job_starts_and_survives_a_kill_with_a_distant_etcd(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    undisturbed = train_undisturbed(tmp_path / "alone", WORKLOAD, SCRIPT)
    with NetworkJob(etcd.endpoint, tmp_path / "job") as job:
        machines = [machine.address for machine in job.network.machines]
        job.network.degrade(job.network.host, *machines, delay_s=ONE_WAY_S)
        nodes = job.bring_to(NODES)
        victim = job.bystanders()[0]
        survivors = {n.name: n.workers()[0].pid for n in nodes if n is not victim}
        generation = job.generation()
        # Steps do not wait for etcd. The first ones precede the keys that say who is ready.
        job.wait_progress(3)
        victim.kill()
        generation = job.wait_training(nodes=NODES - 1, after_generation=generation)
        assert {n.name: n.workers()[0].pid for n in job.running} == survivors
        job.start_node()  # a restart, too, reaches etcd
        job.wait_training(nodes=NODES, after_generation=generation)
        job.wait_all_train(since_s=time.time())
        job.assert_finishes_whole(undisturbed)
