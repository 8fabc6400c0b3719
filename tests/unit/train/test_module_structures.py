"""Wrapped modules whose parameters are replaced, added or removed in training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from elastic.errors import TrainingError
from elastic.train.checks import ModuleStructures
from elastic.train.ddp import ElasticDDP


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList()
        prune.identity(self.out, "weight")  # type: ignore[no-untyped-call]


@pytest.fixture
def net() -> Net:
    return Net()


class Check:
    """As the loop over steps, when a step begins."""

    def __init__(self, net: Net) -> None:
        wrapped = [ElasticDDP(net)]
        self.structures = ModuleStructures(lambda: wrapped)

    def __call__(self) -> None:
        self.structures.begin(0)


@pytest.fixture
def check(net: Net) -> Iterator[Check]:
    check = Check(net)
    check()
    yield check
    check.structures.close()


def replace(net: Net) -> None:
    net.hidden.weight = nn.Parameter(net.hidden.weight.detach().clone())


def replace_frozen(net: Net) -> None:
    net.hidden.weight = nn.Parameter(net.hidden.weight.detach().clone(), requires_grad=False)


def grow(net: Net) -> None:
    net.blocks.append(nn.Linear(1, 1))


def start_pruning(net: Net) -> None:
    prune.l1_unstructured(net.hidden, "weight", amount=0.5)  # type: ignore[no-untyped-call]


def add_a_buffer(net: Net) -> None:
    net.hidden.register_buffer("seen", torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replace, "'hidden.weight' was replaced"),
        (replace_frozen, "'hidden.weight' was replaced"),
        (grow, "got the new entry 'blocks.0.weight'"),
        (start_pruning, "got the new entry 'hidden.weight_orig'"),
        (add_a_buffer, "got the new entry 'hidden.seen'"),
    ],
)
def test_a_change_is_refused_in_each_later_step(
    net: Net,
    check: Check,
    change: Callable[[Net], None],
    named: str,
) -> None:
    change(net)
    for _ in range(2):
        with pytest.raises(TrainingError, match=named):
            check()


def change_in_place(net: Net) -> None:
    with torch.no_grad():
        net.hidden.weight.copy_(net.hidden.weight + 1)
    net.hidden.weight.data = net.hidden.weight.data * 2


def assign_a_buffer(net: Net) -> None:
    assert net.norm.running_mean is not None
    net.norm.running_mean = net.norm.running_mean + 1


def prune_more(net: Net) -> None:
    mask = net.out.weight_mask
    assert isinstance(mask, torch.Tensor)
    mask.zero_()


def cache(net: Net) -> None:
    net.hidden.register_buffer("cached", torch.zeros(1), persistent=False)


def freeze(net: Net) -> None:
    net.requires_grad_(False)


def change_a_copy(net: Net) -> None:
    copy.deepcopy(net.hidden).register_buffer("seen", torch.zeros(1))


@pytest.mark.parametrize(
    "change", [change_in_place, assign_a_buffer, prune_more, cache, freeze, change_a_copy]
)
def test_other_changes_are_accepted(net: Net, check: Check, change: Callable[[Net], None]) -> None:
    change(net)
    check()


def test_another_module_is_compared_with_itself(net: Net) -> None:
    """The function of run.retry may create its objects again."""
    wrapped = [ElasticDDP(net)]
    structures = ModuleStructures(lambda: wrapped)
    structures.begin(0)
    other = Net()
    grow(other)
    wrapped[:] = [ElasticDDP(other)]
    structures.begin(1)
    structures.close()


@pytest.mark.parametrize("change", [replace, grow])
def test_a_change_before_the_first_step_is_refused(
    net: Net, change: Callable[[Net], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters of the world's beginning are those that DDP reduces."""
    wrapped = ElasticDDP(net)
    monkeypatch.setattr(wrapped, "_in_world_parameters", tuple(net.parameters()))
    monkeypatch.setattr(wrapped, "in_world", True)
    change(net)
    structures = ModuleStructures(lambda: [wrapped])
    with pytest.raises(TrainingError, match=r"was replaced|got the new entry"):
        structures.begin(0)
    structures.close()
