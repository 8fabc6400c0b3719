"""Optimizers that update parameters in no module of the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.train.untracked import UnsavedParameters


class Tracked:
    """An object of the script, whose state is a copy of the parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter

    def state_dict(self) -> dict[str, Any]:
        return {"values": [self.parameter.detach().clone()]}


def trained(*shape: int) -> torch.Tensor:
    parameter = torch.randn(shape, requires_grad=True)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    return parameter


def refuse(
    parameter: torch.Tensor,
    *,
    name: str | None = "optimizer",
    tracked: tuple[object, ...] = (),
    state: Mapping[str, object] | None = None,
    steps: tuple[int, ...] = (4,),
) -> None:
    unsaved, optimizer = UnsavedParameters(), torch.optim.Adam([parameter])
    for step in steps:
        unsaved.refuse(name, optimizer, [parameter], (optimizer, *tracked), state or {}, step)


def test_parameters_in_no_saved_object_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"optimizer \(Adam\) updates .* step 4 .*\[3, 2\]"):
        refuse(trained(3, 2))
    with pytest.raises(TrainingError, match="step 4"):
        refuse(trained(3), tracked=(nn.Linear(3, 1),), state={"lr": 0.1, "weights": torch.zeros(3)})


def test_parameters_in_another_tracked_object_or_in_the_state_are_allowed() -> None:
    parameter = trained(3)
    refuse(parameter, tracked=(nn.ParameterList([parameter]),))
    refuse(parameter, tracked=(Tracked(parameter),))
    refuse(parameter, state={"log_alpha": parameter.detach().clone()})
    refuse(torch.zeros(3, requires_grad=True))  # no gradient: frozen


def test_an_untracked_optimizer_may_update_parameters_within_a_step() -> None:
    parameter = trained(3)
    refuse(parameter, name=None, steps=(4, 4))
    with pytest.raises(TrainingError, match="Adam, which is not tracked, updates"):
        refuse(parameter, name=None, steps=(4, 5))
