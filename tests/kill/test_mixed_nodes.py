"""Heterogeneous nodes: different numbers of workers are supported, incompatible settings are
refused.

The job's workers have DataLoader workers that are always busy in ``__getitem__``: they inherit
their parent's sockets and outlive it, which used to hide its death.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.processes import freeze, is_alive
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

NPROC = {"two": 2, "one": 1}
# A step takes as long as its samples: 0.8 s on three ranks. Data workers are never idle, and an
# idle machine has completed a third of the job when the test ends.
WORKLOAD = Workload(samples=1000, epochs=6, loader_workers=2, step_s=0.0, extra=("--busy-s=0.2",))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("mixed-alone"), WORKLOAD)


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries, reference: Path) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint], folder, workload=WORKLOAD, min_nodes=1, max_nodes=3
        ),
        reference,
    )


@pytest.fixture
def nodes(job: TrainingJob) -> list[str]:
    """Two nodes that train together: one with two workers, one with one."""
    generation = job.training_nodes()[0]
    running = {node.name for node in job.running}
    missing = [name for name in NPROC if name not in running]
    for name in missing:
        job.start_node(name, nproc=NPROC[name])
    job.wait_training(nodes=2, after_generation=generation if missing else 0)
    return list(NPROC)


def test_nodes_with_different_nproc_train_together(job: TrainingJob, nodes: list[str]) -> None:
    generation = job.training_nodes()[0]
    ranks = {(s.node, s.rank) for s in job.ledger().starts if s.generation == generation}
    assert sorted(rank for _, rank in ranks) == [0, 1, 2]
    assert sorted(node for node, _ in ranks) == ["one", "two", "two"]


@pytest.mark.parametrize(
    ("smallest", "largest"),
    [(2, 3), (1, 5)],
)
def test_a_joining_node_with_other_limits_is_refused(
    job: TrainingJob, nodes: list[str], smallest: int, largest: int
) -> None:
    generation = job.generation()
    stranger = job.start_node("stranger", min_nodes=smallest, max_nodes=largest)
    assert stranger.wait(PATIENCE_S) == 2, stranger.log_tail()
    output = stranger.log_text()
    assert "nnodes" in output
    assert f"{smallest} to {largest}" in output
    assert "1 to 3" in output
    job.wait_progress(3)
    assert job.generation() == generation


def test_a_joining_node_of_another_version_is_refused(
    job: TrainingJob, nodes: list[str], tmp_path: Path
) -> None:
    generation = job.generation()
    # The metadata that pip would leave after installing version 99.0 there.
    installed = tmp_path / "torch_elastic_harness-99.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch-elastic-harness\nVersion: 99.0\n"
    )
    (installed / "entry_points.txt").write_text(
        "[torchrun.handlers]\netcd-v3 = elastic.launcher.entrypoint:handlers\n"
    )
    stranger = job.start_node("stranger", env={"PYTHONPATH": str(tmp_path)})
    assert stranger.wait(PATIENCE_S) == 2, stranger.log_tail()
    assert "99.0" in stranger.log_text()
    job.wait_progress(3)
    assert job.generation() == generation


def test_busy_data_workers_end_with_a_killed_worker(job: TrainingJob, nodes: list[str]) -> None:
    generation = job.generation()
    node = job.node("two")
    victim = node.workers()[0]
    wait_early_in_an_epoch(job)
    children = children_of(node, victim.pid)
    assert len(children) >= WORKLOAD.loader_workers
    freeze(children)  # a frozen process does not exit on its own at the end of the epoch
    node.kill_worker(0)
    node.wait_gone(children, PATIENCE_S)
    job.wait_training(nodes=2, after_generation=generation)
    assert not is_alive(victim.pid)


def test_survivors_of_a_node_death_keep_their_busy_data_workers(
    job: TrainingJob, nodes: list[str]
) -> None:
    """Data workers of the survivors run for the rest of the epoch."""
    wait_early_in_an_epoch(job)
    generation, survivor = job.generation(), job.node("two")
    workers = [process.pid for process in survivor.workers().values()]
    before = [sorted(children_of(survivor, pid)) for pid in workers]
    job.node("one").kill()
    job.wait_training(nodes=1, after_generation=generation)
    assert [sorted(children_of(survivor, pid)) for pid in workers] == before
    assert all(len(children) >= WORKLOAD.loader_workers for children in before)


def children_of(node: LocalNode, parent: int) -> list[int]:
    return [process.pid for process in node.processes() if process.parent == parent]


def wait_early_in_an_epoch(job: TrainingJob) -> None:
    """All ranks have their data workers, and will need them for fifteen more steps: 12 s."""

    def is_early() -> bool:
        return 2 <= (job.ledger().last_step + 1) % WORKLOAD.steps_per_epoch <= 27

    job.wait_for(is_early, PATIENCE_S, "an epoch that has just begun")


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, nodes: list[str], reference: Path
) -> None:
    job.assert_finishes_whole(reference)
