"""Loops over an iterator that outlives them, in an attribute or a variable of the module."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kit.run_kit import STEPS_PER_EPOCH, job, parts_of, process, steps_of_job
from torch.utils.data import DataLoader, TensorDataset

from elastic.train.step import Step


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


def test_the_boundary_of_an_epochs_last_step_follows_the_code_that_has_run(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        run.state["ended"] = 0
        for epoch in run.epochs(3):
            boundary = parts_of(run).session.progress.rollback.snapshot
            if boundary:  # a fault now repeats no code of an earlier epoch
                assert boundary["progress"]["epoch"] == boundary["state"]["ended"] == epoch
            held = iter(script.loader)
            for _ in range(script.loader.index, len(script.loader)):
                script.update(*next(held))
            run.state["ended"] += 1  # before the step is committed
        assert parts_of(run).session.progress.rollback.snapshot["state"]["ended"] == 3


def test_an_evaluation_counts_after_a_step_without_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_out: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.arange(3.0)))
    with process() as run:
        script = job(run)
        batches = iter(script.loader)
        next(batches)
        monkeypatch.setattr(Step, "samples", 0)
        assert math.isnan(run.mean(1, loss=1.0)["loss"])
        assert len(list(run.shard(held_out))) == 3
        assert run.mean(3, error=0.5) == {"error": 0.5}
        del batches
