"""Containers of optimizers are tracked as their optimizers, unless they have other state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.run_kit import job, network, parts_of, process
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Optimizer

from elastic.errors import TrainingError
from elastic.train.rebuilding import optimizers_instead_of


class Several:
    """As in many scripts: two kinds of optimizers with one step()."""

    def __init__(self, *optimizers: Optimizer, **attributes: Any) -> None:
        self.optimizers = optimizers
        vars(self).update(attributes)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): one.state_dict() for i, one in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, one in enumerate(self.optimizers):
            one.load_state_dict(state[str(i)])


class Container(Optimizer):
    """As in torchtitan: an optimizer over the parameters of its optimizers."""

    def __init__(self, optimizers: dict[str, Optimizer], *others: nn.Parameter) -> None:
        self.by_name = optimizers
        inner = [p for o in optimizers.values() for g in o.param_groups for p in g["params"]]
        super().__init__([*inner, *others], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.by_name.values():
            one.step()


def pair() -> tuple[nn.Module, list[Optimizer]]:
    model = network()
    first, *others = model.parameters()
    return model, [SGD([first], lr=0.1), SGD(others, lr=0.2)]


def named(*optimizers: Optimizer) -> Container:
    return Container(dict(zip("ab", optimizers, strict=True)))


def test_containers_are_replaced_by_their_optimizers() -> None:
    model, optimizers = pair()
    plain = Several(*optimizers, model=model, name="muon", is_fused=True, function=len, none=None)
    for container in (plain, named(*optimizers)):
        assert optimizers_instead_of(container) == optimizers


@pytest.mark.parametrize("other", [{"n": 3}, {"mean": torch.zeros(1)}, {"losses": [0.5]}])
def test_containers_with_other_state_are_not(other: dict[str, Any]) -> None:
    assert optimizers_instead_of(Several(*pair()[1], **other)) == []


def test_optimizers_with_parameters_of_their_own_are_not() -> None:
    own = nn.Parameter(torch.zeros(1))
    optimizers = dict(zip("ab", pair()[1], strict=True))
    for one in (Container(optimizers, own), optimizers["a"], nn.Linear(1, 1)):
        assert optimizers_instead_of(one) == []


def train_a_step(container: Any, model: nn.Module, run: Any) -> None:
    run.begin()
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    container.step()
    run.commit()


@pytest.mark.parametrize(
    "kind", [Several, lambda *two: Container(dict(zip("ab", two, strict=True)))]
)
def test_a_tracked_container_updates_the_model(kind: Any) -> None:
    model, optimizers = pair()
    before = [p.detach().clone() for p in model.parameters()]
    with process() as run:
        wrapped, container = run.wrap(model), kind(*optimizers)
        run.track(optimizers=container)
        assert parts_of(run).session.job.tracked == dict(
            zip(("optimizers.0", "optimizers.1"), optimizers, strict=True)
        )
        train_a_step(container, wrapped, run)
        assert not any(map(torch.equal, before, model.parameters()))


def test_the_optimizers_of_a_container_with_other_state_must_be_tracked() -> None:
    model, optimizers = pair()
    with process() as run:
        wrapped, container = run.wrap(model), Several(*optimizers, n=3)
        run.track(both=container)
        with pytest.raises(
            TrainingError, match="only the Several that contains it is tracked"
        ) as e:
            train_a_step(container, wrapped, run)
        assert e.value.hint is not None
        assert 'run.track(**{f"optimizer{i}": one for i, one in enumerate(both.optimizers)})' in (
            e.value.hint
        )


@pytest.mark.parametrize("is_in_step", [False, True])
def test_a_state_dict_that_initialises_the_optimizer_in_training_is_refused_by_name(
    is_in_step: bool,
) -> None:
    """torch calls optimizer.step() with a learning rate of 0."""
    with process() as run:
        script = job(run)

        def train() -> None:
            for _ in run.epochs(1):
                for _ in script.loader if is_in_step else range(1):
                    get_optimizer_state_dict(script.model, script.optimizer)

        with pytest.raises(TrainingError, match="get_state_dict and set_optimizer_state_dict call"):
            run.retry(train)
