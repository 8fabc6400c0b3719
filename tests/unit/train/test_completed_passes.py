"""Passes whose epochs the script counts, or nobody: a complete one does not begin again."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.run_kit import STEPS_PER_EPOCH, Job, job, process, run_of, steps_of_job

from elastic.train.folder import Checkpoints


def train(script: Job) -> int:
    """One pass; the number of steps."""
    done = 0
    for x, y in script.loader:
        script.update(x, y)
        done += 1
    return done


def failed_after_a_pass(folder: Path, passes: int = 1) -> None:
    """A process whose script fails in the code after a pass: its last commit is saved."""
    policy = Checkpoints(folder=folder, when=100)
    with run_of(policy, clean=False, error="ValueError: in the evaluation") as run:
        script = job(run)
        run.state["pass"] = 0  # in a script that counts its passes
        for _ in [None] * passes:
            train(script)


def test_the_code_after_a_pass_is_repeated_without_the_pass(tmp_path: Path) -> None:
    failed_after_a_pass(tmp_path)
    with process(tmp_path) as run:
        script = job(run)
        assert script.loader.index == len(script.loader)
        run.state["pass"] = 0  # in a script that counts its passes
        assert train(script) == 0
        assert steps_of_job(run) == STEPS_PER_EPOCH
        assert train(script) == STEPS_PER_EPOCH  # the next pass


def test_a_loop_over_the_index_is_empty_after_a_complete_pass(tmp_path: Path) -> None:
    failed_after_a_pass(tmp_path, passes=2)
    with process(tmp_path) as run:
        script = job(run)
        assert list(range(script.loader.index, len(script.loader))) == []
        assert train(script) == 0
        assert script.loader.position.epoch == 1


@pytest.mark.parametrize("reads_index_first", [False, True])
def test_a_loop_of_passes_over_the_index_repeats_the_code_after_a_complete_pass_once(
    tmp_path: Path, reads_index_first: bool
) -> None:
    failed_after_a_pass(tmp_path)
    batches: list[int] = []
    with process(tmp_path) as run:
        script = job(run)
        run.state["passes begun"] = 7  # before the loop, which undoes it
        for _ in range(3):
            first = script.loader.index if reads_index_first else None
            remaining = iter(script.loader)
            numbers = range(script.loader.index if first is None else first, len(script.loader))
            assert "passes begun" not in run.state
            for _ in numbers:
                script.update(*next(remaining))
                run.commit()  # the iterator is held: the last step would not have ended
            batches.append(len(numbers))
        assert script.loader.position.epoch == 2
    assert batches == [0, STEPS_PER_EPOCH, STEPS_PER_EPOCH]


def test_what_is_changed_before_a_complete_pass_is_undone_where_it_begins(tmp_path: Path) -> None:
    failed_after_a_pass(tmp_path)
    with process(tmp_path) as run:
        script = job(run)
        remaining = iter(script.loader)
        assert script.loader.index == STEPS_PER_EPOCH
        run.state["early"] = 1
        assert list(remaining) == []
        assert "early" not in run.state
        run.state["late"] = 1
        assert train(script) == STEPS_PER_EPOCH
        assert run.state == {"pass": 0, "late": 1}


def test_a_completed_job_that_is_extended_trains_all_its_new_passes(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        train(job(run))
    with process(tmp_path) as run:
        script = job(run)
        assert script.loader.index == 0
        assert [train(script), train(script)] == [STEPS_PER_EPOCH, STEPS_PER_EPOCH]
        assert script.loader.position.epoch == 2


def test_each_call_of_retry_begins_a_new_pass() -> None:
    with process() as run:
        script = job(run)
        assert run.retry(train, script) == STEPS_PER_EPOCH
        assert run.retry(train, script) == STEPS_PER_EPOCH
        assert steps_of_job(run) == 2 * STEPS_PER_EPOCH


def test_epochs_are_counted_by_the_run_as_before(tmp_path: Path) -> None:
    policy = Checkpoints(folder=tmp_path, when=100)
    with run_of(policy, clean=False, error="ValueError: in the evaluation") as run:
        script = job(run)
        script.train(epochs=1)
    with process(tmp_path) as run:
        assert job(run).train(epochs=3) == 2 * STEPS_PER_EPOCH
