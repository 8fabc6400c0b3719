"""Scripts that ask for a batch before they train on the previous one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.training.loop.reading_ahead import ReadingAhead


def first_step_without_training(model: nn.Module) -> tuple[ReadingAhead, torch.Tensor]:
    ahead, batch = ReadingAhead(), torch.ones(1, 2)
    ahead.step_began({"inputs": [batch]})
    ahead.step_ended(0, [model], trained=False)
    return ahead, batch


def test_the_batch_of_the_step_before_is_refused() -> None:
    model = nn.Linear(2, 1)
    _, batch = first_step_without_training(model)
    with pytest.raises(TrainingError, match="requests the next batch") as refused:
        model(input=batch)
    assert "non_blocking=True" in str(refused.value)


def test_a_copy_of_it_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU: which batch a copy was made from cannot be known."""
    model = nn.Linear(2, 1)
    _, batch = first_step_without_training(model)
    model(batch.clone())
    assert "step 0 ended without a forward pass" in caplog.text


def test_only_the_second_step_is_watched() -> None:
    model = nn.Linear(2, 1)
    ahead, batch = first_step_without_training(model)
    ahead.step_began(torch.zeros(1, 2))
    ahead.step_ended(1, [model], trained=True)
    model(batch)


def test_a_loop_that_trains_in_its_first_step_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ahead, batch = nn.Linear(2, 1), ReadingAhead(), torch.ones(1, 2)
    ahead.step_began(batch)
    ahead.step_ended(0, [model], trained=True)
    model(batch)
    assert not caplog.text
