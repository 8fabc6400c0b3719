"""A fault, or the end of the process, comes between a step's commit and its callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit.run_kit import STEPS_PER_EPOCH, Job, job, parts_of, process

import checkpoints
from elastic.train.loop import Commits
from elastic.train.step import Progress, Step

AT = 3  # the step whose callbacks are outstanding
LAST_OF_EPOCH = STEPS_PER_EPOCH - 1


class Average:
    """An average of the weights, updated after each step, and the steps that it has seen."""

    def __init__(self, script: Job) -> None:
        self._script = script
        self.values = script.weights()
        self.steps: list[int] = []
        script.run.track(average=self)
        script.run.after_step(self.update)

    def update(self, step: Step) -> None:
        self.values = self.values.lerp(self._script.weights(), 0.1)
        self.steps = [*self.steps, step.number]

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        values, steps = state["values"], state["steps"]
        assert isinstance(values, torch.Tensor) and isinstance(steps, list)
        self.values, self.steps = values.clone(), list(steps)


@pytest.fixture(scope="module")
def undisturbed() -> torch.Tensor:
    with process() as run:
        script = job(run)
        average = Average(script)
        script.train()
        return average.values


@contextmanager
def peer_dies_after_commit(number: int) -> Iterator[None]:
    """The first collective after the commit of a step fails: the ranks compare their replicas."""

    def fail(commits: Commits, step: Step) -> None:
        if step.number == number:
            raise ConnectionError("connection closed by peer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Commits, "_compare_replicas", fail)
        yield


def save_while_paused(folder: Path, number: int, *, more_callbacks: int = 0) -> None:
    """Train until a peer dies after the commit of a step, save as in a paused world, and die."""
    with process(folder, every_steps=100, clean=False) as run:
        script = job(run)
        average = Average(script)
        for _ in range(more_callbacks):
            run.after_step(lambda step: None)
        with peer_dies_after_commit(number), pytest.raises(ConnectionError):
            script.train()
        assert average.steps == list(range(number))
        parts = parts_of(run)
        parts.session.progress.interrupt()
        parts.session.checkpoints.save(parts.session.job)
        assert parts.session.checkpoints.wait(60.0)
    (saved,) = checkpoints.list_checkpoints(folder)
    assert saved.step == number + 1


def test_they_are_called_in_the_process_that_resumes(
    tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    """As when fewer nodes than the minimum remain, the job is saved, and the last one dies, too."""
    save_while_paused(tmp_path, AT)
    with process(tmp_path) as run:
        script = job(run)
        average = Average(script)
        script.train()
    assert average.steps == list(range(2 * STEPS_PER_EPOCH))
    assert torch.equal(average.values, undisturbed)


def test_they_are_called_before_the_evaluation_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    save_while_paused(tmp_path, LAST_OF_EPOCH)
    with process(tmp_path) as run:
        script = job(run)
        average = Average(script)
        at_evaluation = []
        for _ in run.epochs(1):
            for x, y in script.loader:
                script.update(x, y)
            at_evaluation.append(list(average.steps))
    assert at_evaluation == [list(range(STEPS_PER_EPOCH))]
    assert average.steps == at_evaluation[0]


def test_they_are_called_even_if_no_step_follows(tmp_path: Path) -> None:
    save_while_paused(tmp_path, LAST_OF_EPOCH)
    with process(tmp_path) as run:
        script = job(run)
        average = Average(script)
        for _ in run.epochs(0):
            raise AssertionError("there is nothing to train")
    assert average.steps == list(range(STEPS_PER_EPOCH))


def test_after_an_error_of_one_of_them_the_others_are_not_called_again(
    tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    heard: list[str] = []
    may_fail = True

    def second(step: Step) -> None:
        if may_fail and step.number == AT:
            raise ValueError("full disk")
        heard.append(f"second {step.number} {step.epoch} {step.index}")

    with pytest.raises(ValueError), process(tmp_path, every_steps=100) as run:
        script = job(run)
        Average(script)
        run.after_step(second)
        try:
            script.train()
        except ValueError as error:
            run.close(clean=False, error=str(error))
            raise
    may_fail = False
    with process(tmp_path) as run:
        script = job(run)
        average = Average(script)
        run.after_step(second)
        script.train()
    assert average.steps == list(range(2 * STEPS_PER_EPOCH))
    assert torch.equal(average.values, undisturbed)
    steps = ((i, *divmod(i, STEPS_PER_EPOCH)) for i in range(2 * STEPS_PER_EPOCH))
    assert heard == [f"second {number} {epoch} {index}" for number, epoch, index in steps]


@pytest.mark.parametrize("more", [1, 2])
def test_a_version_of_the_script_with_fewer_callbacks_resumes(tmp_path: Path, more: int) -> None:
    save_while_paused(tmp_path, AT, more_callbacks=more)
    with process(tmp_path) as run:
        script = job(run)
        average = Average(script)
        script.train()
    assert average.steps == list(range(2 * STEPS_PER_EPOCH))


def test_progress_of_an_older_checkpoint_has_none() -> None:
    progress = Progress(step=7, last=(6, 0, 6), callbacks_left=2)
    progress.load({"step": 3, "epoch": 1})
    assert progress == Progress(step=3, epoch=1)
