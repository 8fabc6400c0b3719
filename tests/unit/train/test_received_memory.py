"""Preallocated memory for the state of a joining rank: the expected state of its optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn, optim

from elastic.train.current import CurrentStep
from elastic.train.optimizers import OptimizerWatch
from elastic.train.progress import RankProgress, Tag
from elastic.train.shards import (
    IN_PLACE_BYTES,
    PAGE_BYTES,
    Reserve,
    expected_state,
    new_memory,
    spec_of,
)
from elastic.train.state import JobState
from elastic.train.transfer import Reconfiguration
from elastic.wire.messages import (
    NO_WORLD,
    WORLD_VARIABLE,
    WorldIdentity,
    identity_variable,
)

SIDE = 1024  # a matrix of 4 MiB
assert SIDE * SIDE * 4 == IN_PLACE_BYTES
Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "AMSGrad": lambda p: optim.AdamW(p, amsgrad=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "Rprop": optim.Rprop,
    "RMSprop": optim.RMSprop,
    "RMSprop, all of it": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
}


def weights() -> list[nn.Parameter]:
    """A large, a small and a frozen parameter."""
    frozen = nn.Parameter(torch.ones(SIDE, SIDE), requires_grad=False)
    return [nn.Parameter(torch.ones(SIDE, SIDE)), nn.Parameter(torch.ones(SIDE)), frozen]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_expected_state_is_what_the_first_step_creates(make: Make) -> None:
    parameters = weights()
    optimizer = make(parameters)
    expected = expected_state(optimizer)
    for parameter in parameters[:2]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    created = [
        spec_of(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.nbytes >= IN_PLACE_BYTES
    ]
    assert Counter(map(str, expected)) == Counter(map(str, created))
    assert expected_state(optimizer) == []  # it has a state now


def test_no_state_is_expected_of_unknown_optimizers() -> None:
    class Own(optim.Optimizer):
        pass

    assert expected_state(Own(weights(), {})) == []
    assert expected_state(optim.Adagrad(weights())) == []  # it creates its state in its constructor


def resident_bytes(tensor: torch.Tensor) -> int:
    """The number of bytes of a tensor that are resident."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(tensor.data_ptr() // PAGE_BYTES * 8)
        entries = pages.read(tensor.nbytes // PAGE_BYTES * 8)
    flags = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    return int(flags.lt(0).sum()) * PAGE_BYTES  # the highest bit: the page is present


def test_the_reserve_is_resident_and_each_part_is_handed_out_once() -> None:
    # The allocator's cache may hold memory that is already resident.
    assert resident_bytes(new_memory(["float32", [16, SIDE, SIDE], "cpu"], torch.device("cpu"))) < (
        IN_PLACE_BYTES
    )
    reserve = Reserve()
    large = nn.Parameter(torch.ones(16, SIDE, SIDE))
    reserve.fill([optim.SGD([large], lr=0.1, momentum=0.9)])
    spec = spec_of(large)
    other = ["bfloat16", *spec[1:]]
    taken = reserve.take({"a": spec, "b": other, "c": spec})
    assert list(taken) == ["a"] and spec_of(taken["a"]) == spec
    assert resident_bytes(taken["a"]) >= taken["a"].nbytes - PAGE_BYTES
    reserve.fill([optim.SGD([large], lr=0.1, momentum=0.9)])
    reserve.clear()
    assert reserve.take({"a": spec}) == {}


@pytest.mark.parametrize("joins", [True, False])
def test_a_joining_rank_receives_into_its_reserve(
    monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    world = NO_WORLD if joins else WorldIdentity(generation=1, nonce="3f9c", lineage=())
    monkeypatch.setenv(WORLD_VARIABLE, identity_variable(world)[WORLD_VARIABLE])
    job = JobState(seed=0)
    job.track("optimizer", optim.AdamW(weights()))
    progress = RankProgress(job, OptimizerWatch(lambda: None), CurrentStep())
    none: Any = SimpleNamespace()
    rank = Reconfiguration(job, progress, none, none, torch.device("cpu"))
    rank.prepare()
    room = cast(Any, rank)._room(Tag(generation=1, step=5))
    spec = spec_of(weights()[0])
    taken = room({"shards": {}, "tree": {}}, {"exp_avg": spec, "exp_avg_sq": spec, "more": spec})
    assert list(taken) == (["exp_avg", "exp_avg_sq"] if joins else [])
    assert not progress.rank_state("world").is_torn  # the handed-out memory is not the model's
