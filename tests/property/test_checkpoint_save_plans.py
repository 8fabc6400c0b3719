"""A plan saves what a state holds, also if it is kept from one save to the next."""

from __future__ import annotations

import collections
import enum
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoints
from checkpoints.save_plan import SavePlan, SavePlanner
from checkpoints.tensors import by_dtype, bytes_of, chunks_of, share_of
from checkpoints.tree import flatten, spec_of
from checkpoints.values import plain_form

BASE = torch.arange(24, dtype=torch.float32)
WAVE = torch.complex(BASE[:6], BASE[6:12])
LARGE = torch.arange(40_000, dtype=torch.float32)  # copied alone

# Several of them share memory, in the same and in other shapes, types and views.
TENSORS = (
    BASE,
    BASE.view(24),
    BASE.view(4, 6),
    BASE.view(4, 6).t(),
    BASE[:6],
    BASE[6:12],
    BASE.view(torch.int32),
    torch.nn.Parameter(BASE[:6].clone()),
    BASE[:0],
    torch.zeros(0, 3),
    torch.tensor(3.0),
    WAVE,
    WAVE.conj(),
    WAVE.conj().imag,
    BASE.to(torch.bfloat16),
    LARGE,
    LARGE[::2],
)


class Level(enum.IntEnum):
    LOW = 1


VALUES: tuple[Any, ...] = (
    *(0, 1, True, None, "a", 0.0, -0.0, float("nan"), 2.5, object(), 1 << 2000),
    *(Level.LOW, np.float32(0.1), {2, 1}, collections.Counter([3, 3]), torch.Size([2])),
)

tensors = st.sampled_from(TENSORS)
values = st.sampled_from(VALUES)
leaves = st.one_of(tensors, tensors, tensors, values)
keys = st.sampled_from(["a", "b", "", "tensor", "0", "a/~", 0, 1, True, 1.5])
states = st.recursive(
    leaves,
    lambda items: st.one_of(
        st.lists(items, max_size=3),
        st.tuples(items, items),
        st.dictionaries(keys, items, max_size=3),
        st.dictionaries(keys, items, max_size=3).map(collections.OrderedDict),
        st.lists(items, max_size=3).map(collections.deque),
        st.dictionaries(st.just("a"), tensors),
    ),
    max_leaves=8,
)


def like(state: Any, data: st.DataObject) -> Any:
    """A state of nearly the same structure, with other leaves."""
    if type(state) in (dict, collections.OrderedDict):
        return type(state)((key, like(item, data)) for key, item in state.items())
    if type(state) in (list, tuple, collections.deque):
        return type(state)(like(item, data) for item in state)
    kept = data.draw(st.booleans())
    return state if kept else data.draw(tensors if isinstance(state, torch.Tensor) else leaves)


def outcome(planner: SavePlanner, state: Any, writers: dict[str, Any]) -> Any:
    """What would be saved, or the refusal."""
    memory = torch.empty(0)

    def reserve(plan: SavePlan) -> torch.Tensor:
        nonlocal memory
        memory = torch.zeros(plan.size_bytes, dtype=torch.uint8)
        return memory

    try:
        planned = planner.copy(state, reserve, **writers)
    except checkpoints.StateError as error:
        return str(error)
    named = planned.named()
    content = planned.plan.content()
    begins = [
        content.begin_of(spec, chunk)
        for spec, place in named.pieces
        for chunk in chunks_of(place, spec.element_bytes)
    ]
    types = sorted(map(json.dumps, named.types))
    pieces, specs = list(named.pieces), list(named.specs.items())
    return json.dumps(named.tree), types, specs, pieces, begins, memory.numpy().tobytes()


def expected(state: Any, writers: dict[str, Any]) -> Any:
    """The same, item by item."""
    try:
        plain, types = plain_form(state)
        tree, tensors = flatten(plain)
    except checkpoints.StateError as error:
        return str(error)
    specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
    pieces = list(share_of(tuple(specs.values()), writers["world_size"], writers["rank"]))
    chunks = [
        (chunk, spec) for spec, place in pieces for chunk in chunks_of(place, spec.element_bytes)
    ]
    data = [bytes(bytes_of(tensors[s.name], c)) if c.count else b"" for c, s in chunks]
    begins = list(itertools.accumulate(map(len, data), initial=0))[:-1]
    of_values = sorted(map(json.dumps, types))
    return json.dumps(tree), of_values, list(specs.items()), pieces, begins, b"".join(data)


@given(states, st.data(), st.integers(1, 3))
def test_a_plan_saves_what_the_state_holds_item_by_item(
    state: Any, data: st.DataObject, world_size: int
) -> None:
    planner = SavePlanner()
    for following in (state, like(state, data), like(state, data), state):
        writers: dict[str, Any] = {
            "world_size": world_size,
            "rank": data.draw(st.integers(0, world_size - 1)),
        }
        wanted = expected(following, writers)
        assert outcome(planner, following, writers) == wanted
        assert outcome(SavePlanner(), following, writers) == wanted


@pytest.mark.parametrize("dtype", by_dtype(), ids=str)
def test_small_tensors_of_each_type_are_copied_together(dtype: torch.dtype) -> None:
    raw = torch.arange(3 * 16, dtype=torch.uint8).view(3, 16) % 2
    state = [row.clone().view(dtype) for row in raw]
    planned = SavePlanner().plan(state, world_size=1, rank=0)
    memory = torch.zeros(48, dtype=torch.uint8)
    planned.copy_into(memory)
    assert memory.equal(raw.flatten())
    assert len(planned.plan.segments) == 1


def test_a_plan_is_kept_where_only_values_and_tensors_change() -> None:
    def state(step: int) -> dict[str, Any]:
        weights = {str(i): torch.full((2, 3), float(step)) for i in range(600)}
        return {"weights": weights, "tied": weights["3"], "step": step}

    planner = SavePlanner()
    first = planner.plan(state(1), world_size=2, rank=1)
    second = planner.plan(state(2), world_size=2, rank=1)
    assert second.plan is first.plan
    assert second.named().tree["dict"]["step"] == {"value": 2}
    assert first.named().tree["dict"]["step"] == {"value": 1}
    assert planner.plan(state(2), world_size=2, rank=0).plan is not first.plan


@pytest.mark.parametrize("changed", [range(7, 8), range(600)], ids=["one", "all"])
def test_a_tensor_of_another_shape_is_found_while_it_is_copied(changed: range) -> None:
    planner = SavePlanner()
    writers: dict[str, Any] = {"world_size": 1, "rank": 0}
    state = [torch.full((2, 3), float(i)) for i in range(600)]
    first = planner.plan(state, **writers)
    for index in changed:
        state[index] = state[index].view(3, 2)
    assert planner.plan(state, **writers).plan is first.plan
    assert outcome(planner, state, writers) == outcome(SavePlanner(), state, writers)
    assert planner.plan(state, **writers).plan is not first.plan
