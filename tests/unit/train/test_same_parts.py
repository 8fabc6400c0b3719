"""Ranks that hold the same part of a parameter: differences of gradients, and of rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.groups.world import ReplicaMesh, World
from elastic.train import sharding
from elastic.train.sharding import GradientFingerprints, HeldParts, compare_same_parts, differ

Change = Callable[[dict[str, Any]], None]


def fingerprint(gradient: torch.Tensor | None) -> list[float]:
    parameter = nn.Parameter(torch.zeros(1 if gradient is None else gradient.shape))
    parameter = nn.Parameter(parameter.to(torch.float32 if gradient is None else gradient.dtype))
    parameter.grad = gradient
    taken = GradientFingerprints([0], lambda: [parameter])
    taken.begin()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.step()
    taken.end()
    return taken.taken[0]


def relative(one: torch.Tensor, other: torch.Tensor | None) -> float:
    return differ(fingerprint(one), fingerprint(other)) / float(one.norm())


@pytest.fixture
def gradient() -> torch.Tensor:
    return torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))


def test_the_difference_is_about_its_norm(gradient: torch.Tensor) -> None:
    assert relative(gradient, gradient.clone()) == 0.0
    assert 0.3 < relative(gradient, gradient / 2) < 0.8
    assert 0.5 < relative(gradient, None) < 2.0
    other = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1))
    assert 0.7 < relative(gradient, other) < 2.5


def test_rounding_in_bfloat16_is_a_small_difference(gradient: torch.Tensor) -> None:
    assert 0 < relative(gradient, gradient.bfloat16().float()) < 0.005
    assert relative(gradient.bfloat16(), (gradient * 1.003).bfloat16()) < 0.01


def test_differences_are_seen_whose_rows_and_columns_add_up_to_nothing(
    gradient: torch.Tensor,
) -> None:
    """As those of a layer before a LayerNorm do."""
    centred = gradient - gradient.mean(0)
    centred -= centred.mean(1, keepdim=True)
    assert relative(centred, None) > 0.4


def test_nothing_is_taken_after_a_comparison() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    taken = GradientFingerprints([1], lambda: [parameter, parameter])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    taken.begin()
    optimizer.step()
    assert taken.taken[0] == [] and len(taken.taken[1]) == 5
    taken.compared()
    taken.begin()  # the next world
    optimizer.step()
    assert taken.taken == [[], []]


def compared(
    monkeypatch: pytest.MonkeyPatch, change: Change, *, gradients: list[torch.Tensor]
) -> bool:
    """The result for two ranks of a replica, the second one of which is changed."""

    def gather(own: Any) -> list[Any]:
        other = copy.deepcopy(own)
        change(other["model"])
        return [own, other]

    monkeypatch.setattr(sharding, "all_gather_json", gather)
    weights = [torch.ones(g.shape) for g in gradients]
    names = [f"layer{n}" for n in range(len(gradients))]
    parts = HeldParts(names, [0] * len(names), [fingerprint(g) for g in gradients])
    mesh = ReplicaMesh.parse({"ep": 2})
    world = World(
        generation=1, nonce="", lineage=(), rank=0, size=2, local_rank=0, local_size=2, node="",
        is_launched=True, mesh=mesh,
    )  # fmt: skip
    return compare_same_parts({"model": weights}, {"model": parts}, world, 7)


def shift(index: int, weight: float, gradient: float) -> Change:
    def change(of: dict[str, Any]) -> None:
        of["weights"][index] = [value + weight for value in of["weights"][index]]
        of["gradients"][index] = [value * (1 + gradient) for value in of["gradients"][index]]

    return change


@pytest.mark.parametrize(
    ("weight", "gradient", "is_same"),
    [
        pytest.param(0.0, 0.0, True, id="the same"),
        pytest.param(1e-5, 0.01, True, id="rounding"),
        pytest.param(0.0, 0.5, False, id="gradients that were not used: a learning rate of 0"),
    ],
)
def test_ranks_with_the_same_weights_pass(
    monkeypatch: pytest.MonkeyPatch, weight: float, gradient: float, *, is_same: bool
) -> None:
    found = compared(monkeypatch, shift(0, weight, gradient), gradients=[torch.ones(9)] * 2)
    assert found is is_same


@pytest.mark.parametrize(
    ("weight", "gradient", "why"),
    [
        pytest.param(1e-5, 0.5, "their gradients differ, too", id="partial gradients"),
        pytest.param(1e-3, 0.0, "they began with different weights", id="other weights"),
    ],
)
def test_ranks_that_differ_are_refused_by_the_name_of_the_parameter(
    monkeypatch: pytest.MonkeyPatch, weight: float, gradient: float, why: str
) -> None:
    with pytest.raises(TrainingError) as refused:
        compared(monkeypatch, shift(1, weight, gradient), gradients=[torch.ones(9)] * 2)
    assert "rank 1 has different weights from rank 0 in model (parameter 1, 'layer1')" in str(
        refused.value
    )
    assert why in str(refused.value)


def test_gradients_that_are_nothing_but_rounding_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bias of the keys in attention has no gradient but rounding errors; a few elements may be
    sums that almost cancel out."""
    gradients = [torch.ones(1000), torch.full((10,), 1e-3), torch.full((7,), 0.02)]
    for index in (1, 2):
        assert compared(monkeypatch, shift(index, 1e-5, 2.0), gradients=gradients)
    with pytest.raises(TrainingError):
        compared(monkeypatch, shift(0, 1e-5, 2.0), gradients=gradients)
