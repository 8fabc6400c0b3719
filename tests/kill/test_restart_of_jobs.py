"""More than one node is lost: too many for the job to continue, or all of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import WorldState


@pytest.fixture(scope="module")
def jobs(
    etcd: EmbeddedEtcd, start_series: StartSeries, workload: Workload, undisturbed: Path
) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint], folder, workload=workload, min_nodes=2, max_nodes=4
        ),
        undisturbed,
    )


@pytest.mark.slow
def test_two_simultaneous_node_deaths_are_survived(job: TrainingJob) -> None:
    nodes = job.bring_to(4)
    generation = job.generation()
    for victim in nodes[1:3]:
        victim.kill()
    job.wait_training(nodes=2, after_generation=generation)


def test_below_min_nodes_the_job_waits_for_enough_nodes(job: TrainingJob) -> None:
    last, *others = job.bring_to(2)
    generation = job.generation()
    for victim in others:
        victim.kill()
    paused = job.wait_generation(generation + 1)
    assert paused.state is WorldState.PAUSED
    assert [m.name for m in paused.members] == [last.name]
    job.start_node()
    job.wait_training(nodes=2, after_generation=paused.generation)
    assert last.running


def test_a_job_resumes_after_the_death_of_all_nodes(job: TrainingJob) -> None:
    job.bring_to(2)
    saved = job.wait_for(
        lambda: checkpoints.list_checkpoints(job.folder / "checkpoints"), PATIENCE_S, "a checkpoint"
    )
    for victim in job.running:
        victim.kill()
    before = job.ledger()
    job.bring_to(2)
    after = job.ledger()
    resumed = min(s.step for s in after.starts if s.generation > before.last_generation)
    assert 0 < saved[0].step <= resumed <= before.last_step + 1


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, undisturbed: Path
) -> None:
    job.bring_to(2)
    job.assert_finishes_whole(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("absolute", ["", "1"])
def test_a_script_that_changes_its_folder_at_each_start_continues_in_the_job_s_folder(
    etcd: EmbeddedEtcd, tmp_path: Path, workload: Workload, absolute: str
) -> None:
    script, env = SCRIPTS / "changing_folder.py", {"ABSOLUTE": absolute}
    with TrainingJob([etcd.endpoint], tmp_path, script=script, workload=workload, env=env) as job:

        def checkpoint_folders() -> list[Path]:
            return list((tmp_path / "outputs").glob("*/checkpoints"))

        job.bring_to(2)
        saved = job.wait_for(
            lambda: checkpoints.list_checkpoints(*checkpoint_folders()), PATIENCE_S, "a checkpoint"
        )
        for victim in job.running:
            victim.kill()
        before = job.ledger()
        job.bring_to(2)
        starts = [s for s in job.ledger().starts if s.generation > before.last_generation]
        assert min(s.step for s in starts) >= saved[0].step
        (folder,) = checkpoint_folders()
        assert f"using {folder}." in job.report()


@pytest.mark.slow
def test_a_cleaner_of_the_folder_for_temporary_files_costs_no_node(
    etcd: EmbeddedEtcd, tmp_path: Path, workload: Workload
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with TrainingJob(
        [etcd.endpoint], tmp_path, workload=workload, env={"TMPDIR": str(temporary)}
    ) as job:
        nodes = job.bring_to(2)
        generation = job.generation()
        for entry in temporary.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        nodes[1].kill_worker()
        job.wait_training(nodes=2, after_generation=generation)
        assert job.running == nodes


@pytest.mark.slow
def test_the_first_world_has_no_more_ranks_than_a_batch_has_samples(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    few = Workload(samples=40, batch=2, epochs=3)
    with TrainingJob([etcd.endpoint], tmp_path, workload=few, min_nodes=2, max_nodes=3) as job:
        nodes = job.start_nodes(3)
        job.wait_training(nodes=2)
        world = job.world()
        assert world is not None and len(world.members) == 2
        job.hurry()
        assert {node.wait(PATIENCE_S) for node in nodes} == {0}, job.report()
        assert job.journaled("worker-died") == []
