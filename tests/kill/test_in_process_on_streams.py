"""Workers die while their collectives run on a stream, as on GPUs; the others go on.

The scenarios of test_in_process_phases.py that end differently where a collective's end says
nothing of its result, on the backend of :mod:`elastic.testing.doubles.nccl_semantics`; and workers
that are stuck in NCCL, which nothing can get out of there.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from test_in_process_phases import SCRIPT, Before, all_back, order
from training_job import TrainingJob, Workload, train_undisturbed

from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.doubles import nccl_semantics
from elastic.testing.node import LocalNode, worker_pids

pytestmark = pytest.mark.cluster

WORKLOAD = Workload(samples=250, epochs=18, step_s=0.6)
PATIENCE_S = 200.0  # two starts of workers and a deadline, on a machine that is busy


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("streams-alone"), WORKLOAD, SCRIPT)


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries, reference: Path) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPT,
            workload=WORKLOAD,
            min_nodes=1,
            max_nodes=3,
            env={"TRAINING_BACKEND": nccl_semantics.NAME},
            # It may find a process that is stuck before that ends by itself, as it has to.
            conf={"hang_detection": "report"},
        ),
        reference,
    )


@pytest.fixture
def before(job: TrainingJob, nodes: list[LocalNode]) -> Before:
    return Before(job.generation(), worker_pids(nodes))


@pytest.mark.parametrize("point", ["backward", "after-optimizer", "evaluation"])
def test_death_in_a_step(job: TrainingJob, before: Before, point: str) -> None:
    job.wait_obeyed(order(job, point, None))
    all_back(job, before, timeout_s=PATIENCE_S)


def test_death_in_a_transfer_of_state(job: TrainingJob, before: Before) -> None:
    """The receiver's. The next world takes the place of this one, whose forming has not ended, and
    on a stream nothing but its agent tells a member so."""
    job.wait_obeyed(order(job, "receiving", None), order(job, "forward", None))
    all_back(job, before, timeout_s=PATIENCE_S)


def test_one_that_gives_up_leaves_nobody_blocked(job: TrainingJob, before: Before) -> None:
    job.wait_obeyed(order(job, "give-up", None))
    all_back(job, before, dead=0, timeout_s=PATIENCE_S)


def test_a_fault_that_the_script_swallowed_counts(job: TrainingJob, before: Before) -> None:
    swallow = job.folder / "swallow"
    swallow.touch()
    try:
        job.running[1].kill_worker()
        all_back(job, before, timeout_s=PATIENCE_S)
    finally:
        swallow.unlink()


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("abort", "aborting the communicators of generation"),
        ("build", "building the process group (nccl_semantics) of generation"),
    ],
)
def test_who_is_stuck_in_nccl_is_started_anew(
    job: TrainingJob, nodes: list[LocalNode], before: Before, where: str, sentence: str
) -> None:
    """Its process ends after a while, with a reason in the journal; the third one keeps its own."""
    stuck, victim = nodes[0], nodes[1]
    began_s = time.monotonic()
    job.wait_obeyed(order(job, f"hang-in-{where}", stuck))
    victim.kill_worker()
    all_back(job, before, dead=2, timeout_s=PATIENCE_S)
    said = job.wait_event("worker-stuck", lambda e: e["node"] == stuck.name, since_s=began_s)
    assert sentence in said["reason"]
    assert sentence in stuck.log_text()


def test_the_job_ends_as_if_nothing_had_happened(
    job: TrainingJob, nodes: list[LocalNode], reference: Path
) -> None:
    job.assert_finishes_whole(reference)
