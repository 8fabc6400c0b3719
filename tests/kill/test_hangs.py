"""Workers that live and do not go on: found, named, ended, recovered from; and false alarms."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.slowness import measure_slowness

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "hangs.py"
WORKLOAD = Workload(samples=480, epochs=400, step_s=0.02, save_every=20)
STOPPED_S = 2.0  # promised for a stopped worker
HUNG_S = 5.0  # promised for an endless loop, and a skipped collective, in steps of 20 ms


@pytest.fixture(scope="module")
def job(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJob]:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path_factory.mktemp("hangs"),
        script=SCRIPT,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
    ) as job:
        yield job


def found(job: TrainingJob, since_s: float) -> list[dict[str, Any]]:
    """Verdicts since a moment on the monotonic clock."""
    events = read_journal(job.folder / "journal")
    return [e for e in events if e["event"] == "hang-found" and e["monotonic"] >= since_s]


def order(job: TrainingJob, kind: str, node: str) -> None:
    path = job.folder / f"hang-{kind}"
    staged = path.with_suffix(".new")
    staged.write_text(node)
    staged.rename(path)


def obeyed(job: TrainingJob, kind: str) -> tuple[int, float]:
    """Which process has obeyed, and when."""
    path = job.folder / f"done-{kind}"

    def said() -> tuple[int, float] | None:
        words = path.read_text().split() if path.exists() else []
        return (int(words[0]), float(words[1])) if len(words) == 2 else None

    return job.wait_for(said, 60, f"a worker that obeys {kind}")


def paused_s(job: TrainingJob, generation: int) -> float:
    """Between the last step before ``generation`` and the first one in it."""
    steps = job.ledger().steps
    before = max(s.time_s for s in steps if s.generation < generation)
    return min(s.time_s for s in steps if s.generation >= generation) - before


def hurt(job: TrainingJob, kind: str, index: int = 1) -> tuple[dict[str, Any], float, int]:
    """Let a worker hang; the verdict, the pause, and the pid of the worker."""
    nodes = job.bring_to(3)
    job.wait_progress(30)
    victim, generation, since_s = nodes[index], job.generation(), time.monotonic()
    pid = victim.workers()[0].pid
    if kind == "stop":
        os.kill(pid, signal.SIGSTOP)
    else:
        order(job, kind, victim.name)
    went_on = job.wait_for(
        lambda: job.training_nodes()[0] > generation, 120, f"training after the hang ({kind})"
    )
    assert went_on
    (verdict,) = found(job, since_s)
    return verdict, paused_s(job, generation + 1), pid


def test_a_stopped_worker_costs_two_seconds(job: TrainingJob) -> None:
    verdict, pause_s, pid = hurt(job, "stop")
    assert verdict["kind"] == "stopped"
    assert "state T" in verdict["reason"]
    assert pause_s < STOPPED_S * measure_slowness()
    report = Path(verdict["report"]).read_text()
    assert f"pid {pid}" in report
    world = job.world()
    assert world is not None
    job.wait_training(nodes=3)
