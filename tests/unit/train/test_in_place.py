"""Arriving state is written into live objects: references that a script keeps stay valid."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.run_kit import job, process
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, MultiStepLR, SequentialLR
from torch.optim.optimizer import Optimizer

from checkpoints.tree import flatten, unflatten
from elastic.train.copies import copied, load_tracked
from elastic.train.ddp import ElasticDDP
from elastic.train.rollback import BoundaryState
from elastic.train.state import JobState
from elastic.train.values import Writing, _are_equal, write_into

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
tensors = st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
states = st.recursive(
    leaves | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc") | st.integers(0, 2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


@given(live=states, saved=states)
def test_a_written_state_equals_the_arriving_one(live: Any, saved: Any) -> None:
    result = write_into(live, copied(saved))
    assert _are_equal(result, saved)
    if type(live) is type(saved) and isinstance(live, (list, dict)):
        assert result is live


@given(state=states, other=states)
def test_parts_that_are_shared_stay_correct(state: Any, other: Any) -> None:
    """Live parts may be the same object, and differ in the arriving state."""
    live = {"a": state, "b": [state], "c": state}
    saved = {"a": other, "b": [state], "c": copied(other)}
    expected = copied(saved)
    write_into(live, copied(saved))
    assert _are_equal(live, expected)


@given(state=states)
def test_the_same_structure_keeps_every_object(state: Any) -> None:
    live, parts = {"x": state}, []

    def collect(value: Any) -> None:
        if isinstance(value, (list, dict, torch.Tensor)):
            parts.append(value)
        if isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        if isinstance(value, dict):
            for item in value.values():
                collect(item)

    collect(live)
    before = list(map(id, parts))
    write_into(live, copied(live))
    parts.clear()
    collect(live)
    assert list(map(id, parts)) == before


def test_tensors_and_arrays_are_updated_in_their_memory() -> None:
    tensor, array, queue, seen = torch.zeros(2), np.zeros(2), collections.deque([1]), {1}
    live = {"tensor": tensor, "array": array, "queue": queue, "seen": seen, "old": 1}
    saved = {"tensor": torch.ones(2), "array": np.ones(2), "queue": collections.deque([2, 3]),
             "seen": {4}, "new": 2}  # fmt: skip
    assert write_into(live, saved) is live
    assert (tensor.tolist(), array.tolist(), list(queue), seen) == ([1, 1], [1, 1], [2, 3], {4})
    assert list(live) == ["tensor", "array", "queue", "seen", "new"]


def test_a_counter_is_replaced_and_not_added() -> None:
    counter = collections.Counter("aab")
    assert write_into(counter, collections.Counter("ac")) is counter
    assert counter == {"a": 1, "c": 1}


@pytest.mark.parametrize(
    "live",
    [
        torch.zeros(3),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(1).expand(2),
        nn.Parameter(torch.zeros(2)) * 2,
        torch.zeros(2).to_sparse(),
        [0.0, 0.0],
        None,
    ],
    ids=["shape", "dtype", "expanded", "result", "layout", "list", "none"],
)
def test_other_tensors_are_replaced(live: Any) -> None:
    state = {"x": live}
    write_into(state, {"x": torch.ones(2)})
    assert state["x"] is not live
    assert torch.equal(state["x"], torch.ones(2))


def test_memory_of_the_weights_is_written_by_the_weights_only() -> None:
    """``run.state["best"] = model.state_dict()`` refers to the weights until a better copy
    replaces it: a new process has the reference, and the arriving state has the copy."""
    weights = torch.full((2,), 3.0)
    user: dict[str, Any] = {"best": {"weight": weights}, "part": weights[:1]}
    Writing([weights]).write(user, {"best": {"weight": torch.ones(2)}, "part": torch.tensor([3.0])})
    assert weights.tolist() == [3.0, 3.0]
    assert user["best"]["weight"].tolist() == [1.0, 1.0]
    assert user["part"].data_ptr() == weights.data_ptr()


class Holder:
    """A tracked object; ``load`` is how it loads its values."""

    def __init__(self, load: Callable[[Holder, Any], None]) -> None:
        self.history: list[Any] = [1.0]
        self.shadow = {"weight": torch.zeros(2)}
        self.current = self.history
        self._load = load

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load(self, state)


def assigns(holder: Holder, state: Any) -> None:
    holder.history, holder.shadow = state["history"], state["shadow"]
    holder.current = holder.history


def copies(holder: Holder, state: Any) -> None:
    holder.history = list(state["history"])
    holder.shadow = {name: value.clone() for name, value in state["shadow"].items()}
    holder.current = holder.history


def clears_and_fills(holder: Holder, state: Any) -> None:
    holder.history.clear()
    holder.history.extend(state["history"])
    holder.shadow.clear()
    holder.shadow.update(state["shadow"])


def updates_attributes(holder: Holder, state: Any) -> None:
    vars(holder).update(state)
    holder.current = holder.history


@pytest.mark.parametrize("load", [assigns, copies, clears_and_fills, updates_attributes])
def test_a_tracked_object_keeps_its_containers_however_it_loads(load: Any) -> None:
    holder = Holder(load)
    history, shadow, weight = holder.history, holder.shadow, holder.shadow["weight"]
    with Writing().keeping(holder):
        holder.load_state_dict({"history": [2.0, [3.0]], "shadow": {"weight": torch.ones(2)}})
    assert holder.history is holder.current is history and history == [2.0, [3.0]]
    assert holder.shadow is shadow and holder.shadow["weight"] is weight
    assert weight.tolist() == [1.0, 1.0]


class Nested(Optimizer):
    """Keeps float32 values inside containers, whatever the type of the weights, and others that
    torch's load_state_dict would break."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            group.update(factors=[1.0, [2.0]], rate=torch.ones(1))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.tensor(1.0),
                    "master": torch.full_like(parameter, 1.001, dtype=torch.float32),
                    "nested": [{"factor": torch.full((2,), 1.001)}, ("axis", 3)],
                    "kind": "row",
                    "size": torch.Size([2, 3]),
                }


def trained(kind: type[Nested] = Nested) -> tuple[nn.Module, Nested]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).bfloat16()
    optimizer = kind([{"params": part.parameters()} for part in module])
    optimizer.step()
    return module, optimizer


def arriving(state: Any) -> Any:
    """A state as it arrives from a checkpoint or another rank."""
    node, found = flatten(state)
    return unflatten(node, lambda path, name: found[name].clone())


def job_of(module: nn.Module, **tracked: Any) -> JobState:
    state = JobState(seed=0)
    state.modules["model"] = ElasticDDP(module)
    for name, one in tracked.items():
        state.track(name, one)
    return state


def test_an_optimizer_keeps_its_groups_and_its_state() -> None:
    _, optimizer = trained()
    module, live = trained()
    optimizer.param_groups[1].update(lr=0.5, factors=[3.0, [4.0]], rate=torch.full((1,), 2.0))
    for state in optimizer.state.values():
        state["nested"][0]["factor"].mul_(2)
    groups, head = live.param_groups, live.param_groups[1]
    factors, rate = head["factors"], head["rate"]
    inner = factors[1]
    factor = next(iter(live.state.values()))["nested"][0]["factor"]
    tree = job_of(trained()[0], optimizer=optimizer).tree()
    job_of(module, optimizer=live).apply(arriving(tree))
    assert live.param_groups is groups and groups[1] is head and head["factors"] is factors
    assert (head["lr"], factors, factors[1] is inner) == (0.5, [3.0, [4.0]], True)
    assert head["rate"] is rate and rate.item() == 2.0
    assert next(iter(live.state.values()))["nested"][0]["factor"] is factor
    assert torch.equal(factor, torch.full((2,), 1.001) * 2)


@pytest.mark.parametrize("is_new", [True, False])
def test_state_of_bfloat16_weights_keeps_its_types(is_new: bool) -> None:
    _, optimizer = trained()
    module, live = trained()
    if is_new:
        live.state.clear()
    job_of(module, optimizer=live).apply(arriving(job_of(trained()[0], optimizer=optimizer).tree()))
    for parameter, state in live.state.items():
        assert state["master"].dtype == state["nested"][0]["factor"].dtype == torch.float32
        assert state["nested"][0]["factor"].tolist() == torch.full((2,), 1.001).tolist()
        assert state["nested"][1] == ("axis", 3) and state["kind"] == "row"
        assert type(state["size"]) is torch.Size and isinstance(parameter, nn.Parameter)


class Wrapping(Optimizer):
    """SAM: shares its groups with the optimizer inside it."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def test_optimizers_that_share_their_groups_still_do() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    outer = Wrapping(inner)
    groups, group = inner.param_groups, inner.param_groups[0]
    state = copy.deepcopy({"outer": outer.state_dict(), "inner": inner.state_dict()})
    for one in state.values():
        one["param_groups"][0]["lr"] = 0.5
    with Writing().keeping(outer, inner):
        load_tracked(outer, state["outer"], {})
        load_tracked(inner, state["inner"], {})
    assert outer.param_groups is inner.param_groups is groups
    assert groups[0] is group and group["lr"] == 0.5


def test_schedulers_and_the_schedulers_inside_them_load_in_place() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)

    def schedule() -> SequentialLR:
        warmup, decay = LinearLR(optimizer, total_iters=2), MultiStepLR(optimizer, [3, 3, 5])
        return SequentialLR(optimizer, [warmup, decay, LambdaLR(optimizer, lambda _: 1.0)], [2, 9])

    source, target = schedule(), schedule()
    inner: Any = target._schedulers[1]
    milestones = inner.milestones
    for _ in range(3):
        optimizer.step()
        source.step()
    job_of(nn.Linear(1, 1), scheduler=target).apply(
        arriving(job_of(nn.Linear(1, 1), scheduler=source).tree())
    )
    decay: Any = target._schedulers[1]
    assert decay.milestones is milestones and type(milestones) is collections.Counter
    assert decay.last_epoch == 1 and target.last_epoch == 3


def test_a_rollback_keeps_references() -> None:
    module, optimizer = trained()
    state = job_of(module, optimizer=optimizer)
    queue: list[Any] = [torch.zeros(1), {"n": 0}]
    state.user["queue"] = queue
    factors = optimizer.param_groups[0]["factors"]
    boundary = BoundaryState(state)
    for _ in range(2):
        taken = boundary.take()
        queue[0].add_(1)
        queue[1]["n"] = 1
        queue.append({})
        factors[1].append(5.0)
        optimizer.param_groups[0]["made"] = 1
        boundary.restore(taken)
        assert state.user["queue"] is queue and queue == [torch.zeros(1), {"n": 0}]
        assert optimizer.param_groups[0]["factors"] is factors and factors == [1.0, [2.0]]
        assert "made" not in optimizer.param_groups[0]


def test_a_rate_set_through_a_reference_takes_effect_after_a_restart(tmp_path: Path) -> None:
    rates: list[tuple[float, float]] = []
    for epochs in (2, 4):
        with process(tmp_path) as run:
            script = job(run)
            group, center = script.optimizer.param_groups[0], torch.zeros(1)
            run.state.setdefault("center", center)
            for epoch in run.epochs(epochs):
                group["lr"] = 0.01 * (epoch + 1)
                for x, y in script.loader:
                    script.update(x, y)
                    center += 1
            assert run.state["center"] is center
            rates.append((script.optimizer.param_groups[0]["lr"], center.item()))
    assert rates == [(0.02, 12.0), (0.04, 24.0)]
