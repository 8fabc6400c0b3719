"""An agent freezes but its workers do not: they never train beside the takeover world."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from training_job import PLAIN, SESSION, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd

pytestmark = pytest.mark.slow

WORKLOAD = Workload(samples=250, epochs=9, step_s=0.8, save_every=4)
LEASE_S = 2.0
TAKEOVER_S = 14.0
# Environment in which the unmodified script runs as a single process.
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def start(etcd: EmbeddedEtcd, folder: Path, script: Path) -> TrainingJob:
    return TrainingJob(
        [etcd.endpoint],
        folder,
        script=script,
        workload=WORKLOAD,
        min_nodes=1,
        max_nodes=2,
        conf={"lease_s": LEASE_S, "takeover_s": TAKEOVER_S, "last_call_s": 1.0},
    )


def test_workers_of_a_frozen_agent_stop_before_a_takeover(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """For a script with this project's API, and one without: two jobs that wait concurrently."""
    references = {
        script: train_undisturbed(tmp_path / f"alone-{script.stem}", WORKLOAD, script, env)
        for script, env in ((SESSION, None), (PLAIN, ALONE))
    }
    with (
        start(etcd, tmp_path / SESSION.stem, SESSION) as in_process,
        start(etcd, tmp_path / PLAIN.stem, PLAIN) as unmodified,
    ):
        jobs = (in_process, unmodified)
        frozen = [job.start_node() for job in jobs]
        generations = [job.wait_training(nodes=1) for job in jobs]
        for job in jobs:
            job.wait_progress(WORKLOAD.save_every + 2)  # past a checkpoint
        for node in frozen:
            os.kill(node.pid, signal.SIGSTOP)
        try:
            others = [job.start_node() for job in jobs]
            taken_over = [
                job.wait_training(nodes=1, after_generation=generation)
                for job, generation in zip(jobs, generations, strict=True)
            ]
            for job, other in zip(jobs, others, strict=True):
                assert job.training_nodes()[1] == {other.name}
                job.wait_progress(3)
                job.ledger().assert_one_world_at_a_time()
        finally:
            for node in frozen:
                os.kill(node.pid, signal.SIGCONT)
        for job, generation in zip(jobs, taken_over, strict=True):
            job.wait_training(nodes=2, after_generation=generation)
        assert all(node.running for node in frozen)
        for job in jobs:
            job.assert_finishes_whole(references[job.script])


def test_a_leader_frozen_during_a_switch_is_not_replaced_while_its_workers_may_train(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Its node key and the leader's end together, so that the joining node, which leads then, has
    never seen in which world those workers still step. They do until the step of the switch."""
    reference = train_undisturbed(tmp_path / "alone", WORKLOAD)
    with start(etcd, tmp_path / "job", SESSION) as job:
        frozen = job.start_node()
        first = job.wait_training(nodes=1)
        job.wait_progress(WORKLOAD.save_every + 2)  # past a checkpoint
        with job.slow_steps(frozen):  # it steps on for longer than its lease lasts
            joining = job.start_node()
            plan = job.wait_generation(first + 1)
            os.kill(frozen.pid, signal.SIGSTOP)
            try:
                assert plan.switch_at_step is not None
                last = job.wait_training(nodes=1, after_generation=plan.generation)
                assert job.training_nodes()[1] == {joining.name}
                job.wait_progress(3)
                job.ledger().assert_one_world_at_a_time()
            finally:
                os.kill(frozen.pid, signal.SIGCONT)
        job.wait_training(nodes=2, after_generation=last)
        assert frozen.running
        job.assert_finishes_whole(reference)
