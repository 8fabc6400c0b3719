"""Buffers that a module resizes when it loads a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.training.state.resized_buffers import resizes


class Observer(nn.Module):
    """As torch's per-channel observers: empty at first."""

    least: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.zeros(0))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if prefix + "least" in state:
            self.least.resize_(state[prefix + "least"].shape)
        super()._load_from_state_dict(state, prefix, *args)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.observer = nn.Linear(2, 3), nn.BatchNorm1d(3), Observer()


SAVED = {
    "layer.weight": torch.ones(4, 2),
    "norm.running_mean": torch.ones(4),
    "observer.least": torch.ones(3),
}


def test_only_a_module_that_resizes_its_buffer_accepts_another_shape() -> None:
    net = Net()
    assert resizes(net, "observer.least", SAVED)
    assert not resizes(net, "norm.running_mean", SAVED)
    assert not resizes(net, "layer.weight", SAVED)


def test_nothing_is_changed_by_the_question() -> None:
    net = Net()
    resizes(net, "observer.least", SAVED)
    assert net.observer.least.shape == (0,)


def test_a_buffer_of_the_outermost_module_may_be_resized() -> None:
    assert resizes(Observer(), "least", {"least": torch.ones(3)})
