"""In restart mode, a worker that ends by itself costs one restart of all nodes, like a SIGKILL, and
every account names that worker, not a survivor's lost connection.
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

# The place in the script, and what the agent knows of the worker's end.
FAILURES = {
    "silent-exit": "ended with exit code 0 during training, without an exception",
    "evaluation": "ZeroDivisionError: failed in the evaluation",
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
            conf={"mode": "restart"},
        )
    )


@pytest.mark.parametrize("place", FAILURES)
def test_all_nodes_restart_once_and_its_end_is_the_only_cause(
    job: TrainingJob, nodes: list[LocalNode], place: str
) -> None:
    (job.folder / "may-end").touch()  # its exit handlers do not delay its end
    job.wait_progress(2)
    began, before, generation = time.monotonic(), worker_pids(nodes), job.generation()
    order, failing = job.folder / f"fail-{place}", nodes[1].name
    staged = order.with_suffix(".new")
    staged.write_text(failing)
    staged.rename(order)

    job.wait_obeyed(order)
    job.wait_training(nodes=3, after_generation=generation)
    (world,) = job.journaled("world-formed", since_s=began)
    assert (len(world["nodes"]), world["mode"]) == (3, "restart")
    assert world["reason"].startswith(f"{failing} failed: ")
    assert FAILURES[place] in world["reason"]
    (died,) = (d for d in job.journaled("worker-died", since_s=began) if d["node"] == failing)
    assert died["pid"] == before[failing]
    assert FAILURES[place] in died["reason"]

    report = report_of(merge(*read_folder(job.folder / "journal")))
    failures = [i for i in report.incidents if i.is_failure and i.generations[0] > generation]
    (incident,) = failures
    assert incident.reason == world["reason"]
    assert incident.errors[0] == (failing, died["reason"])
