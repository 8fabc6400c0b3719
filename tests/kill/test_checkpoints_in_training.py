"""Asynchronous saves while disks, nodes and scripts fail: one job for each mode.

As in test_deaths.py, each test starts from training nodes and may run alone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "saving.py"
WORKLOAD = Workload()  # the workload of the fixture `undisturbed`
BY_THE_CLOCK = replace(WORKLOAD, extra=("--seconds=0.5",))


@pytest.fixture(scope="module")
def jobs(
    etcd: EmbeddedEtcd, start_series: StartSeries, undisturbed: Path
) -> JobSeries[TrainingJob]:
    """In-process, three nodes, with a time-based save policy."""
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint], folder, script=SCRIPT, workload=BY_THE_CLOCK, min_nodes=2, max_nodes=3
        ),
        undisturbed,
    )


@pytest.fixture(scope="module")
def restarted_jobs(
    etcd: EmbeddedEtcd, start_series: StartSeries, undisturbed: Path
) -> JobSeries[TrainingJob]:
    """Restart mode, two nodes, saving every ten steps."""
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPT,
            workload=WORKLOAD,
            min_nodes=2,
            max_nodes=2,
            conf={"mode": "restart"},
        ),
        undisturbed,
    )


@pytest.fixture
def restarted(restarted_jobs: JobSeries[TrainingJob]) -> TrainingJob:
    return restarted_jobs.current()


def saved(job: TrainingJob) -> list[checkpoints.CheckpointInfo]:
    """Committed checkpoints, newest first."""
    return list(checkpoints.list_checkpoints(job.folder / "checkpoints"))


def newest_step(job: TrainingJob) -> int:
    return max((info.step for info in saved(job)), default=0)


def wait_saved(job: TrainingJob, count: int = 1) -> None:
    """Wait until that many more checkpoints are committed, the first of them begun from now on."""
    done = job.ledger().last_step + 1  # the save of this step may have begun

    def enough() -> bool:
        return sum(info.step > done for info in saved(job)) >= count

    job.wait_for(enough, PATIENCE_S, f"{count} checkpoints after step {done}")


def told(job: TrainingJob, order: str, node: str = "") -> Path:
    path = job.folder / order
    staged = path.with_suffix(".new")
    staged.write_text(node)
    return staged.rename(path)


def first_starts(job: TrainingJob, after_generation: int) -> set[int]:
    """The steps at which the ranks of the first later world began."""
    starts = [s for s in job.ledger().starts if s.generation > after_generation]
    first = min(s.generation for s in starts)
    return {s.step for s in starts if s.generation == first}


def terminate_all(job: TrainingJob) -> tuple[int, set[int]]:
    """SIGTERM to every node at once: returns the steps completed by then, and the exit codes."""
    nodes = job.running
    for node in nodes:
        node.terminate()
    codes = {node.wait(PATIENCE_S) for node in nodes}
    return job.ledger().last_step + 1, codes


@pytest.mark.slow
def test_a_time_based_save_policy_saves_the_same_steps_on_all_ranks(job: TrainingJob) -> None:
    job.bring_to(3)
    done = job.ledger().last_step + 1  # by two of them, if the third came later

    def steps_by_node() -> list[list[int]] | None:
        found: dict[str, list[int]] = {}
        for event in job.journaled("checkpoint-saved"):
            if event["step"] > done:
                found.setdefault(event["node"], []).append(event["step"])
        is_enough = len(found) == 3 and min(map(len, found.values())) >= 4
        return [sorted(steps) for steps in found.values()] if is_enough else None

    steps = job.wait_for(steps_by_node, PATIENCE_S, "four checkpoints on each of three nodes")
    # One node may have logged more of them by now.
    assert steps[0][:4] == steps[1][:4] == steps[2][:4]
    assert all(info.world_size == 3 for info in saved(job) if info.step > done)


@pytest.mark.parametrize(
    "order", ["disk-full", pytest.param("disk-readonly", marks=pytest.mark.slow)]
)
def test_a_failing_disk_is_logged_and_older_checkpoints_are_kept(
    job: TrainingJob, order: str
) -> None:
    job.bring_to(3)
    wait_saved(job)
    before, began_s = {info.name for info in saved(job)}, time.monotonic()
    refusal = told(job, order)
    texts = ("No space left", "Read-only file system")

    def is_refused() -> bool:
        """(A save in progress may be skipped first, for another reason.)"""
        reasons = [e["reason"] for e in job.journaled("checkpoint-skipped", since_s=began_s)]
        return any(text in reason for text in texts for reason in reasons)

    job.wait_for(is_refused, PATIENCE_S, "a save that the disk refuses")
    job.wait_progress(5)
    assert before <= {info.name for info in saved(job)}
    refusal.unlink()
    wait_saved(job)
    assert job.journaled("world-fault", since_s=began_s) == []


def test_a_hung_disk_on_one_node_stops_saving_but_not_training(job: TrainingJob) -> None:
    nodes = job.bring_to(3)
    wait_saved(job)
    hang = told(job, "disk-hang", nodes[1].name)
    began_s = time.monotonic()
    skipped = job.wait_event(
        "checkpoint-skipped", lambda e: "use all buffers" in e["reason"], since_s=began_s
    )
    before = job.ledger().last_step + 1
    job.wait_progress(8)  # twice the save interval
    # Saves in progress on that node only may have been committed.
    assert newest_step(job) <= before, skipped
    hang.unlink()
    wait_saved(job)
    assert job.journaled("world-fault", since_s=began_s) == []


def test_a_rank_that_dies_while_writing_loses_only_that_checkpoint(job: TrainingJob) -> None:
    nodes = job.bring_to(3)
    wait_saved(job)
    before, generation = {info.name for info in saved(job)}, job.generation()
    job.wait_obeyed(told(job, "die-writing", nodes[1].name))
    job.wait_training(nodes=3, after_generation=generation)
    wait_saved(job)
    assert before <= {info.name for info in saved(job)}
    attempts = (job.folder / "checkpoints").glob
    job.wait_for(
        lambda: not any(attempts(f".tmp-step-*.g{generation}.*")), PATIENCE_S, "swept attempts"
    )


def test_a_job_resumes_without_loss_after_sigterm_to_all_nodes(job: TrainingJob) -> None:
    job.bring_to(3)
    job.wait_progress(5)
    done, codes = terminate_all(job)
    assert codes == {75}
    assert newest_step(job) == done
    generation = job.ledger().last_generation  # perhaps of the nodes that were signalled last
    job.bring_to(2)
    assert first_starts(job, generation) == {done}


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, undisturbed: Path
) -> None:
    job.bring_to(2)
    job.assert_finishes_whole(undisturbed)
    assert newest_step(job) == WORKLOAD.steps


@pytest.mark.soak
def test_restart_mode_survives_a_rank_that_dies_while_writing(restarted: TrainingJob) -> None:
    job = restarted
    nodes = job.bring_to(2)
    wait_saved(job, 2)
    before, generation = newest_step(job), job.generation()
    job.wait_obeyed(told(job, "die-writing", nodes[1].name))
    job.wait_training(nodes=2, after_generation=generation)
    starts = first_starts(job, generation)
    assert len(starts) == 1 and min(starts) >= before
    wait_saved(job)


@pytest.mark.soak
def test_restart_mode_loses_no_step_to_an_exception_of_the_script(restarted: TrainingJob) -> None:
    job = restarted
    job.bring_to(2)
    job.wait_progress(7)
    generation = job.generation()
    job.wait_obeyed(told(job, "raise"))
    job.wait_training(nodes=2, after_generation=generation)
    ledger = job.ledger()
    done = max(s.step for s in ledger.steps if s.generation == generation) + 1
    assert first_starts(job, generation) == {done}


@pytest.mark.soak
def test_restart_mode_resumes_without_loss_after_sigterm_to_all_nodes(
    restarted: TrainingJob,
) -> None:
    job = restarted
    job.bring_to(2)
    job.wait_progress(7)
    done, codes = terminate_all(job)
    assert codes == {75}
    assert newest_step(job) == done
    generation = job.ledger().last_generation
    job.bring_to(2)
    assert first_starts(job, generation) == {done}


@pytest.mark.soak
def test_restart_mode_ends_with_the_weights_of_an_undisturbed_run(
    restarted: TrainingJob, undisturbed: Path
) -> None:
    restarted.bring_to(2)
    restarted.assert_finishes_whole(undisturbed)
