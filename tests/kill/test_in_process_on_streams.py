"""Workers die while their collectives run on a stream, as on GPUs; the others continue.

The scenarios of test_in_process_phases.py that differ if the end of a collective does not imply its
result, on the backend of :mod:`kit.nccl_semantics`; and workers stuck in NCCL,
which cannot be interrupted.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from kit import nccl_semantics
from test_in_process_phases import SCRIPT, Before, all_back, order
from training_job import TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode, worker_pids

pytestmark = pytest.mark.slow

WORKLOAD = Workload(samples=250, epochs=12, step_s=0.6)
PATIENCE_S = 200.0  # two starts of workers and a deadline, on a busy machine


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
            # It might find a stuck process before that exits on its own, as it must.
            conf={"hang_detection": "report"},
        ),
        reference,
    )


@pytest.fixture
def before(job: TrainingJob, nodes: list[LocalNode]) -> Before:
    return Before(job.generation(), worker_pids(nodes))


@pytest.mark.parametrize("point", ["backward", "after-optimizer", "evaluation"])
def test_a_death_in_a_step_keeps_the_other_workers(
    job: TrainingJob, before: Before, point: str
) -> None:
    job.wait_obeyed(order(job, point, None))
    all_back(job, before, timeout_s=PATIENCE_S)


def test_a_death_in_a_state_transfer_keeps_the_other_workers(
    job: TrainingJob, before: Before
) -> None:
    """The receiver dies. The next world supersedes this one while it is still forming, and on a
    stream a member learns of that only from its agent.
    """
    job.wait_obeyed(order(job, "receiving", None), order(job, "forward", None))
    all_back(job, before, timeout_s=PATIENCE_S)


def test_a_rank_that_leaves_a_collective_blocks_no_peer(job: TrainingJob, before: Before) -> None:
    job.wait_obeyed(order(job, "give-up", None))
    all_back(job, before, dead=0, timeout_s=PATIENCE_S)


def test_a_fault_swallowed_by_the_script_still_causes_a_recovery(
    job: TrainingJob, before: Before
) -> None:
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
def test_a_worker_stuck_in_nccl_is_restarted(
    job: TrainingJob, nodes: list[LocalNode], before: Before, where: str, sentence: str
) -> None:
    """Its process exits after a while, with a reason in the journal; the third worker keeps its
    process.
    """
    stuck, victim = nodes[0], nodes[1]
    began_s = time.monotonic()
    job.wait_obeyed(order(job, f"hang-in-{where}", stuck))
    victim.kill_worker()
    all_back(job, before, dead=2, timeout_s=PATIENCE_S)
    event = job.wait_event("worker-stuck", lambda e: e["node"] == stuck.name, since_s=began_s)
    assert sentence in event["reason"]
    assert sentence in stuck.log_text()


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, nodes: list[LocalNode], reference: Path
) -> None:
    job.assert_finishes_whole(reference)
