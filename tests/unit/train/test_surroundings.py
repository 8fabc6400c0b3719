"""What a function changes outside of itself before its loop, and is called again."""

from __future__ import annotations

import argparse
import functools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from elastic.train.ddp import ElasticDDP
from elastic.train.state import JobState
from elastic.train.surroundings import Surroundings


@dataclass
class Config:
    lr: float = 1.0
    milestones: list[int] = field(default_factory=lambda: [3])
    weights: torch.Tensor = field(default_factory=lambda: torch.ones(3))


class Rates:
    base = 1.0


factor = 1.0


def scale_global() -> float:
    global factor
    factor *= 2
    return factor


def of_namespace(config: Any) -> Callable[[], float]:
    def function() -> float:
        config.lr *= 2
        return float(config.lr)

    return function


def of_dict() -> Callable[[], float]:
    config = {"lr": 1.0}

    def function() -> float:
        config["lr"] *= 2
        return config["lr"]

    return function


def of_list(values: Any) -> Callable[[], int]:
    def function() -> int:
        values.append(1)
        return len(values)

    return function


def of_tensor() -> Callable[[], float]:
    config = Config()

    def function() -> float:
        config.weights.mul_(2)
        return float(config.weights[0])

    return function


def of_class() -> float:
    Rates.base *= 2
    return Rates.base


class Trainer:
    def __init__(self) -> None:
        self.config = Config()

    def train(self) -> tuple[float, list[int]]:
        self.config.lr *= 2
        self.config.milestones.append(5)
        return self.config.lr, list(self.config.milestones)


class Samples(Dataset[float]):
    scale = 1.0

    def __getitem__(self, index: int) -> float:
        return self.scale


def of_dataset() -> Callable[[], float]:
    data = Samples()
    data.scale = 2.0

    def function() -> float:
        data.scale *= 0.5
        return data[0]

    return function


def of_module() -> Callable[[], float]:
    layer = nn.Dropout(0.4)

    def function() -> float:
        layer.p *= 0.5
        return layer.p

    return function


def of_entry() -> Callable[[], float]:
    options = {"scale": 2.0}

    def function() -> float:
        return options.pop("scale", 1.0)

    return function


def of_array() -> Callable[[], float]:
    weights = np.ones(3)

    def function() -> float:
        weights[:] = weights * 2
        return float(weights[0])

    return function


def of_variable() -> Callable[[], float]:
    rate = 1.0

    def function() -> float:
        nonlocal rate
        rate *= 2
        return rate

    return function


def of_generator(draw: Callable[[], float]) -> Callable[[], list[float]]:
    def function() -> list[float]:
        return [draw(), draw()]

    return function


def draw_of(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


FUNCTIONS: list[Callable[[], object]] = [
    scale_global,
    of_namespace(SimpleNamespace(lr=1.0)),
    of_namespace(argparse.Namespace(lr=1.0)),
    of_namespace(Config()),
    of_dict(),
    of_list([]),
    of_list(deque(maxlen=5)),
    of_tensor(),
    of_class,
    Trainer().train,
    functools.partial(of_namespace(Config())),
    of_module(),
    of_array(),
    of_entry(),
    of_variable(),
    of_dataset(),
    of_generator(random.Random(1).random),
    of_generator(functools.partial(np.random.Generator.random, np.random.default_rng(1))),
    of_generator(functools.partial(draw_of, torch.Generator())),
]


def surroundings() -> Surroundings:
    return Surroundings(JobState(0))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("is_loop_reached", [True, False])
def test_each_call_begins_with_the_same_values(
    function: Callable[[], object], is_loop_reached: bool
) -> None:
    around = surroundings()
    around.begin_call([function], is_again=False)
    first = function()
    for _ in range(3):
        if is_loop_reached:
            around.reach_loop()
        around.begin_call([function], is_again=True)
        assert function() == first
    around.begin_call([function], is_again=True)


def test_what_the_loop_changes_is_kept() -> None:
    config = SimpleNamespace(lr=1.0, steps=0, losses=[], seen=[])

    def function() -> None:
        config.lr *= 2
        config.seen.append("before")
        around.reach_loop()
        config.steps += 1
        config.losses.append(0.5)
        config.seen.append("in the loop")

    around = surroundings()
    for _ in range(2):
        around.begin_call([function], is_again=False)
        function()
        around.end_call()
    assert config.lr == 1
    assert config.steps == 2
    assert config.losses == [0.5, 0.5]
    assert config.seen == ["before", "in the loop"] * 2


def test_another_call_begins_with_the_values_of_the_one_before() -> None:
    config = Config()
    around = surroundings()
    for expected in (2.0, 4.0):
        around.begin_call([config], is_again=False)
        config.lr *= 2
        around.reach_loop()
        assert config.lr == expected


def test_the_state_of_the_job_and_objects_are_left_alone() -> None:
    """The state is restored to its boundary."""
    net = nn.Linear(2, 2)
    job = JobState(0, modules={"model": ElasticDDP(net)}, user={"epoch": 1})
    config = SimpleNamespace(writer=None, writers={})
    around = Surroundings(job)
    around.begin_call([net, job.user, config], is_again=False)
    job.user["epoch"] = 2
    config.writer = config.writers["log"] = object()
    with torch.no_grad():
        net.weight.fill_(3)
    around.begin_call([net, job.user, config], is_again=True)
    assert job.user == {"epoch": 2}
    assert config.writer is config.writers["log"] is not None
    assert net.weight[0, 0] == 3


@pytest.mark.parametrize("guard", ["a flag", "an attribute", "an object"])
def test_what_a_function_does_once_is_done_at_the_loop(guard: str) -> None:
    config = SimpleNamespace(lr=1.0, names=["a"], is_scaled=False, writer=None)
    undone = {
        "a flag": lambda: not config.is_scaled,
        "an attribute": lambda: not hasattr(config, "scaled"),
        "an object": lambda: config.writer is None,
    }

    def function() -> None:
        if undone[guard]():
            config.lr *= 2
            config.names.append("b")
            config.is_scaled, config.scaled, config.writer = True, True, object()
        around.reach_loop()
        assert (config.lr, config.names) == (2, ["a", "b"])

    around = surroundings()
    for is_again in (False, True, True):
        around.begin_call([config], is_again=is_again)
        function()
        around.end_call()  # before the callbacks for the next world


def test_an_object_that_cannot_be_read_does_not_end_the_call() -> None:
    class Closed:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("closed")

    config = Config()
    around = surroundings()
    around.begin_call([Closed(), config], is_again=False)
    config.lr *= 2
    around.begin_call([Closed(), config], is_again=True)
    assert config.lr == 1


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_finished_work_changes_is_kept(function: Callable[[], object]) -> None:
    """It is not done again."""
    around, other = surroundings(), SimpleNamespace(lr=1.0)
    around.begin_call([function, other], is_again=False)
    other.lr *= 2
    with around.keeping():
        function()
    around.reach_loop()
    around.end_call()
    assert other.lr == 1
    around.begin_call([function], is_again=False)
    with_kept = function()
    around.begin_call([function], is_again=True)
    assert function() == with_kept


def test_what_interrupted_work_changes_is_undone() -> None:
    config = SimpleNamespace(lr=1.0)
    around = surroundings()
    around.begin_call([config], is_again=False)
    with pytest.raises(RuntimeError), around.keeping():
        config.lr *= 2
        raise RuntimeError("a peer has died")
    around.end_call()
    assert config.lr == 1


def test_attributes_of_the_jobs_modules_return_to_their_boundary_first() -> None:
    """It gives them the values that the call before has set."""
    layer = nn.Dropout(0.4)
    job = JobState(0, modules={"model": ElasticDDP(nn.Sequential(nn.Linear(1, 1), layer))})
    around = Surroundings(job)
    for is_again in (False, True, True):
        around.begin_call([], is_again=is_again)
        layer.p *= 0.5
        around.reach_loop()
        (attributes,) = job.attributes().values()
        attributes.accept()
        around.end_call()
        attributes.restore({})
        assert layer.p == 0.2


def test_a_tensor_that_gets_another_shape_gets_its_own_back() -> None:
    config = Config()
    around = surroundings()
    around.begin_call([config], is_again=False)
    config.weights.data = torch.zeros(5)
    around.begin_call([config], is_again=True)
    assert config.weights.tolist() == [1, 1, 1]
