"""Loops over an iterator that outlives them, in an attribute or a variable of the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_kit import STEPS_PER_EPOCH, job, process, steps_of_job


def test_the_last_step_is_committed_and_saved_at_the_end_of_the_process(tmp_path: Path) -> None:
    with process(tmp_path, every_steps=100) as run:
        script = job(run)
        held = iter(script.loader)
        for _ in range(4):
            script.update(*next(held))
        expected = script.weights()
    with process(tmp_path) as run:
        script = job(run)
        rest = iter(script.loader)
        next(rest)
        assert steps_of_job(run) == 4
        assert torch.equal(script.weights(), expected)


def test_the_last_step_is_committed_when_the_training_function_returns(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        held = []

        def train() -> None:
            held.append(iter(script.loader))
            for _ in range(4):
                script.update(*next(held[0]))

        run.retry(train)
        assert steps_of_job(run) == 4


def test_a_batch_that_was_only_inspected_at_the_end_is_no_step(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        held = iter(script.loader)
        script.update(*next(held))
        next(held)
    with process(tmp_path) as run:
        script = job(run)
        next(iter(script.loader))
        assert steps_of_job(run) == 1


def test_an_iterator_ends_with_the_training_function() -> None:
    with process() as run:
        script = job(run)
        held = []

        def train() -> None:
            held.append(iter(script.loader))
            for _ in range(2):
                script.update(*next(held[0]))

        run.retry(train)
        with pytest.raises(StopIteration):
            next(held[0])
        for x, y in script.loader:  # resumes
            script.update(x, y)
        assert steps_of_job(run) == STEPS_PER_EPOCH


def test_an_epoch_whose_iterator_is_held_ends_with_its_last_step() -> None:
    with process() as run:
        script = job(run)
        held = []
        for _ in run.epochs(3):
            held.append(iter(script.loader))
            for _ in range(len(script.loader)):
                script.update(*next(held[-1]))
        assert steps_of_job(run) == 3 * STEPS_PER_EPOCH
