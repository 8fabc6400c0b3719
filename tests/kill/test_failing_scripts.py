"""A script that fails on one rank costs what a SIGKILL of its worker costs, wherever it fails: the
others change worlds once, immediately, and every account names that rank and its error.
"""

from __future__ import annotations

import time

import pytest
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.report.model import report_of
from elastic.store.embedded import EmbeddedEtcd
from elastic.telemetry.reader import merge, read_folder
from elastic.testing.node import LocalNode, worker_pids

pytestmark = pytest.mark.slow

# The place in the script, and the last line of what it raises there.
FAILURES = {
    "data-worker": "RuntimeError: DataLoader worker (pid",
    "evaluation": "ZeroDivisionError: failed in the evaluation",
    "callback": "KeyError: 'failed in the callback'",
    "exit": "sys.exit(3)",
    "cuda": "CUDA error: an illegal memory access was encountered",
}


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPTS / "failing.py",
            workload=Workload(samples=96, epochs=200, step_s=0.2),
            min_nodes=2,
            max_nodes=3,
        )
    )


@pytest.mark.parametrize("place", FAILURES)
def test_the_others_change_worlds_once_and_its_error_is_the_only_cause(
    job: TrainingJob, nodes: list[LocalNode], place: str
) -> None:
    job.wait_progress(2)  # another incident than that of the nodes' arrival
    began, before, generation = time.monotonic(), worker_pids(nodes), job.generation()
    may_end, order = job.folder / "may-end", job.folder / f"fail-{place}"
    may_end.unlink(missing_ok=True)
    failing = nodes[1].name
    staged = order.with_suffix(".new")
    staged.write_text(failing)
    staged.rename(order)

    job.wait_obeyed(order)
    job.wait_training(nodes=2, after_generation=generation)
    assert worker_pids(job.running) == before, "its exit handlers still run"
    (world,) = job.journaled("world-formed", since_s=began)
    assert world["reason"].startswith(f"{failing} failed: ")
    assert FAILURES[place] in world["reason"]
    (died,) = job.journaled("worker-died", since_s=began)
    assert (died["node"], died["pid"]) == (failing, before[failing])
    assert FAILURES[place] in died["reason"]

    may_end.touch()
    job.wait_training(nodes=3, after_generation=generation)
    after = worker_pids(job.running)
    assert {name for name in before if after[name] != before[name]} == {failing}

    report = report_of(merge(*read_folder(job.folder / "journal")))
    failures = [i for i in report.incidents if i.is_failure and i.generations[0] > generation]
    (incident,) = failures
    assert incident.reason == world["reason"]
    assert incident.errors[0] == (failing, died["reason"])
