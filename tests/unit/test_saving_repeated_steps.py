"""No checkpoint is saved while the weights contain an update of a step that is repeated.

In the process that repeats it, the optimizer is masked. A process that restores such a checkpoint
would apply the update twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from run_kit import STEPS_PER_EPOCH, Job, job, parts_of, process

import checkpoints
from elastic.training.recovery.agreement import Tag
from elastic.training.run import Run

AT = 4  # the step that is interrupted after its update
EVERY = 2  # steps between two saves


@contextmanager
def repeating(folder: Path) -> Iterator[tuple[Run, Job]]:
    """A rank in the world after a fault: it repeats step AT with the optimizer masked. The save
    before this step was lost."""
    with process(folder, every_steps=EVERY, clean=False) as run:
        script, parts = job(run), parts_of(run)
        progress = parts.state.progress
        batches = iter(script.loader)
        for _ in range(AT + 1):
            script.update(*next(batches))
            progress.tag = progress.tag or Tag(1, 0)
        assert parts.job.progress.step == AT
        progress.interrupt()
        assert progress.tag is not None and progress.tag.stepped == ("optimizer",)
        assert parts.checkpoints.wait(60.0)
        for info in checkpoints.list_checkpoints(folder):
            if info.step == AT:
                checkpoints.LocalStorage(folder).remove_folder(info.name)
        progress.agreed(progress.tag, generation=2)
        lineage, _, _ = parts.checkpoints.origin
        ours = (*lineage, checkpoints.Ancestor(2, AT))
        parts.checkpoints.inherit(ours, 2, saved_step=AT - EVERY)
        parts.checkpoints.begin_world(parts.lifecycle.world, parts.job)
        yield run, script


def saved_steps(folder: Path) -> list[int]:
    return sorted(info.step for info in checkpoints.list_checkpoints(folder))


def test_a_pause_or_an_end_before_the_step_is_repeated_saves_nothing(tmp_path: Path) -> None:
    with repeating(tmp_path) as (run, _):
        parts = parts_of(run)
        parts.checkpoints.save(parts.job)
        assert not parts.checkpoints.flush(parts.job, 60.0)
        assert parts.checkpoints.wait(60.0)
    assert saved_steps(tmp_path) == [AT - EVERY]


def test_a_save_that_is_due_before_the_step_is_made_after_it(tmp_path: Path) -> None:
    with process() as run:
        script = job(run)
        script.train(epochs=1)
        undisturbed = script.weights()
    with repeating(tmp_path) as (run, script):
        parts = parts_of(run)
        batches = iter(script.loader)
        batch = next(batches)
        assert parts.checkpoints.wait(60.0)
        assert saved_steps(tmp_path) == [AT - EVERY]
        script.update(*batch)
        next(batches)
        assert parts.checkpoints.wait(60.0)
        assert saved_steps(tmp_path) == [AT - EVERY, AT + 1]
    with process(tmp_path, every_steps=100) as run:
        script = job(run)
        script.train(epochs=1)
        assert parts_of(run).job.progress.step == STEPS_PER_EPOCH
        assert torch.equal(script.weights(), undisturbed)
