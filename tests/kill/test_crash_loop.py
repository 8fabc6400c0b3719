"""A joining node that fails by itself interrupts a healthy job at most once per quarantine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.membership.progress import decode_progress
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S

QUARANTINE_S = 15.0
WORKLOAD = Workload(samples=500, epochs=300, step_s=0.2)


def test_a_joining_node_with_a_data_set_of_another_size_is_quarantined(
    shared_etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """All ranks of a first world would fail with this error; here, two of three train on."""
    with TrainingJob(
        [shared_etcd.endpoint],
        tmp_path,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf={"quarantine_s": 300.0, "last_call_s": 1.0},
    ) as job:
        healthy = job.start_nodes(2)
        job.wait_training(nodes=2)
        before = {node.name: node.workers()[0].pid for node in healthy}
        job.args = tuple(replace(WORKLOAD, samples=400).arguments(job.folder))
        job.start_node("other-data")

        def quarantined() -> str | None:
            entry = job.store.get(job.keys.progress)
            progress = decode_progress(entry.key, entry.value) if entry is not None else None
            reasons = (w.reason for w in progress.waiting) if progress is not None else ()
            return next((reason for reason in reasons if "quarantined" in reason), None)

        reason = job.wait_for(quarantined, PATIENCE_S, "its quarantine in the job's status")
        assert "400" in reason and "500" in reason, reason
        job.wait_progress(3)
        assert job.training_nodes()[1] == set(before)
        assert {node.name: node.workers()[0].pid for node in healthy} == before


@pytest.mark.slow
def test_a_crash_looping_joining_node_interrupts_the_job_once(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPTS / "phases.py",
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf={"quarantine_s": QUARANTINE_S, "last_call_s": 1.0},
    ) as job:
        healthy = job.start_nodes(2)
        job.wait_training(nodes=2)
        before = {node.name: node.workers()[0].pid for node in healthy}
        job.start_node("crashing", env={"CRASH_AFTER_STEPS": "3"})

        def crashed() -> float | None:
            """The time of the crash, reported by its agent, or by torchrun if that polls first."""
            again = [e for e in job.journaled("node-arrived") if e["exit_code"]]
            times_s = [float(e["monotonic"]) for e in (*job.journaled("worker-died"), *again)]
            return min(times_s, default=None)

        # Its worker is ready again within seconds, and stays outside the world.
        until_s = job.wait_for(crashed, PATIENCE_S, "the first crash") + 0.7 * QUARANTINE_S
        while time.monotonic() < until_s:
            job.wait_progress(1)
        joined = [
            event
            for event in job.journaled("world-formed")
            if event["cause"] == "joined" and event["monotonic"] < until_s
        ]
        assert len(joined) == 1, joined
        node = job.node("crashing")
        job.wait_for(node.workers, PATIENCE_S, "its workers, which are kept ready")
        assert {node.name: node.workers()[0].pid for node in healthy} == before
