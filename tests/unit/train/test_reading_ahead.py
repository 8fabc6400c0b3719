"""Scripts that request a batch before they train on the previous one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.train.reading import ReadingAhead


def first_step_without_training(model: nn.Module) -> tuple[ReadingAhead, torch.Tensor]:
    ahead, batch = ReadingAhead(), torch.ones(1, 2)
    ahead.step_began({"inputs": [batch]})
    ahead.step_ended(0, [model], trained=False)
    return ahead, batch


def test_a_batch_of_the_previous_step_is_rejected() -> None:
    model = nn.Linear(2, 1)
    _, batch = first_step_without_training(model)
    with pytest.raises(TrainingError, match="requests the next batch") as refused:
        model(input=batch)
    assert "non_blocking=True" in str(refused.value)


def test_a_copy_of_the_previous_batch_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU: it is unknown which batch a copy was made from."""
    model = nn.Linear(2, 1)
    _, batch = first_step_without_training(model)
    model(batch.clone())
    assert "step 0 ended without a forward pass" in caplog.text


def test_only_the_second_step_is_checked() -> None:
    model = nn.Linear(2, 1)
    ahead, batch = first_step_without_training(model)
    ahead.step_began(torch.zeros(1, 2))
    ahead.step_ended(1, [model], trained=True)
    model(batch)


def test_a_loop_that_trains_in_its_first_step_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ahead, batch = nn.Linear(2, 1), ReadingAhead(), torch.ones(1, 2)
    ahead.step_began(batch)
    ahead.step_ended(0, [model], trained=True)
    model(batch)
    assert not caplog.text
