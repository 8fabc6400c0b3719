"""Arguments of the wrong type or size are rejected by the call, with the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.run_kit import dataset, job, network, run_of
from torch import nn
from torch.utils.data import DataLoader

import elastic
from checkpoints import StateError
from elastic import errors
from elastic.errors import ConfigError, ElasticError, TrainingError
from elastic.train.folder import Checkpoints
from elastic.train.run import Run


def batches(**sizes: Any) -> Callable[[Run], object]:
    return lambda run: run.loader(DataLoader(dataset(), batch_size=4), **sizes)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda run: run.wrap("net"), "run.wrap('net'): no Module"),
        (lambda run: run.wrap(nn.Linear), "run.wrap(the class Linear): no Module"),
        (lambda run: run.wrap([network()]), "run.wrap(list): no Module"),
        (lambda run: run.track(torch.optim.SGD(network().parameters())), "run.track(SGD): an obj"),
        (lambda run: run.track(optimizer=torch.optim.SGD), "run.track(optimizer=SGD): a class"),
        (batches(global_batch="8"), "global_batch='8' is not an integer"),
        (batches(global_batch=8.0), "global_batch=8.0 is not an integer"),
        (batches(global_batch=True), "global_batch=True is not an integer"),
        (batches(micro_batch=0), "micro_batch=0 is below 1"),
        (batches(max_steps=2.5), "max_steps=2.5 is not an integer"),
        (lambda run: run.epochs("3"), "run.epochs: '3' is not an integer"),
        (lambda run: run.epochs(range(3)), "run.epochs: range(0, 3) is not an integer"),
        (lambda run: run.epochs(-1), "run.epochs: -1 is below 0"),
        (lambda run: run.steps(20), "run.steps(20): no ElasticLoader"),
        (lambda run: run.steps(DataLoader(dataset())), "run.steps(DataLoader): no ElasticLoader"),
        (lambda run: run.retry(None), "run.retry(None): not a function"),
        (lambda run: run.after_step(1), "run.after_step(1): not a function"),
        (lambda run: run.on_world("x"), "run.on_world('x'): not a function"),
        (lambda run: run.on_main(None), "run.on_main(None): not a function"),
        (lambda run: run.mean("a", loss=1.0), "run.mean: weight 'a' is not a number"),
        (lambda run: run.mean(-1, loss=1.0), "run.mean: weight -1.0 is not a weight"),
        (lambda run: run.mean(float("nan"), loss=1.0), "run.mean: weight nan is not a weight"),
        (lambda run: run.mean(1, loss=None), "run.mean: loss=None is not a number"),
        (lambda run: run.mean(1, loss="1"), "run.mean: loss='1' is not a number"),
        (lambda run: run.mean(1, loss=torch.ones(3)), "loss=a tensor of shape (3,) is not a num"),
    ],
)
def test_wrong_arguments_are_rejected_by_the_call(
    call: Callable[[Run], object], expected: str
) -> None:
    with run_of(None) as run, pytest.raises(ElasticError) as caught:
        call(run)
    assert expected in caught.value.message


def test_integers_of_other_libraries_are_accepted() -> None:
    with run_of(None) as run:
        loader = run.loader(DataLoader(dataset(), batch_size=4), global_batch=np.int64(8))
        assert type(loader.plan.global_batch) is int
        none, two, nothing = (
            cast(int, torch.tensor(0)),
            cast(float, torch.tensor(2.0)),
            cast(Any, None),
        )
        assert list(run.epochs(none)) == []
        assert run.mean(two, loss=np.float32(3.0)) == {"loss": 3.0}
        assert run.mean(0, loss=nothing) != {}, "a rank without samples has no value"


@pytest.mark.parametrize("folder", [5, 2.5, ["a"], object()])
def test_a_checkpoint_folder_of_another_type_is_rejected(folder: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no folder, no address and no storage"):
        Checkpoints(folder)


def test_later_calls_of_join_may_only_repeat_the_arguments() -> None:
    before = {"checkpoints": "a", "mesh": None, "seed": 3}
    for same in ({}, {"seed": 3}, {"checkpoints": "a", "mesh": None}, {"seed": 0}):
        errors.same_as_before("elastic.join", same, before)
    for name, other in (("checkpoints", "b"), ("mesh", {"shard": 2}), ("seed", 4)):
        with pytest.raises(ConfigError, match=rf"elastic.join\({name}=.*after a call with {name}="):
            errors.same_as_before("elastic.join", {name: other}, before)


def test_join_rejects_a_seed_that_is_no_integer() -> None:
    with pytest.raises(ConfigError, match=r"elastic.join: seed='x' is not an integer"):
        elastic.join(seed="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"a": object()}], "state['x/0/a'] is a builtins.object"),
        ({(1, 2): [torch.Generator()]}, "state['x/0/1/0'] is a torch._C.Generator"),
    ],
)
def test_a_value_that_cannot_be_stored_is_rejected_after_its_step(
    value: Any, expected: str
) -> None:
    with run_of(None) as run, pytest.raises(TrainingError) as caught:
        script = job(run)
        for step in run.steps(script.loader):
            for x, y in step:
                script.update(x, y)
            run.state["x"] = value
    assert expected in str(caught.value) and "run.state" in str(caught.value)


def test_storable_values_are_accepted() -> None:
    with run_of(None) as run:
        script = job(run)
        for step in run.steps(script.loader):
            for x, y in step:
                script.update(x, y)
            run.state["x"] = (1, None, {"a": [True, 2.5, "b"], 3: torch.ones(1)}, np.float64(1.0))


class Memory:
    """A tracked object with a generator in its state, from its first step on."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def test_a_tracked_object_with_a_value_that_cannot_be_stored_is_rejected() -> None:
    memory = Memory()
    with run_of(None) as run:
        script = job(run)
        run.track(memory=memory)
        memory.kept.append(torch.Generator())
        with pytest.raises(StateError) as caught:
            next(iter(run.steps(script.loader)))
        with pytest.raises(
            TrainingError, match=r"run.track\(other=…\): state\['kept/0'\] is a torch"
        ):
            run.track(other=memory)
    assert "state['tracked/memory/kept/0'] is a torch._C.Generator" in str(caught.value)
