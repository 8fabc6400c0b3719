"""A plan that is kept from one save to the next saves what a new one would."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoints
from checkpoints.save_plan import PlannedSave, SavePlan, SavePlanner
from checkpoints.tensors import by_dtype, bytes_of

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
VALUES: tuple[Any, ...] = (0, 1, True, None, "a", 0.0, -0.0, float("nan"), 2.5, object(), 1 << 2000)

tensors = st.sampled_from(TENSORS)
values = st.sampled_from(VALUES)
leaves = st.one_of(tensors, tensors, tensors, values)
keys = st.sampled_from(["a", "b", 0, 1, True])
states = st.recursive(
    leaves,
    lambda items: st.one_of(
        st.lists(items, max_size=3),
        st.tuples(items, items),
        st.dictionaries(keys, items, max_size=3),
        st.dictionaries(st.just("a"), tensors),
    ),
    max_leaves=8,
)


def like(state: Any, data: st.DataObject) -> Any:
    """A state of nearly the same structure, with other leaves."""
    if isinstance(state, dict):
        return {key: like(item, data) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
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
    assert memory.numpy().tobytes() == expected_bytes(planned)
    names = [(spec, place) for spec, place in planned.plan.pieces]
    return json.dumps(planned.tree), planned.plan.specs, names, memory.tolist()


def expected_bytes(planned: PlannedSave) -> bytes:
    """Piece by piece."""
    pieces = zip(planned.plan.pieces, planned.tensors, strict=True)
    return b"".join(bytes(bytes_of(t, place)) for (_, place), t in pieces if place.count)


@given(states, st.data(), st.integers(1, 3))
def test_a_kept_plan_saves_what_a_new_one_would(
    state: Any, data: st.DataObject, world_size: int
) -> None:
    planner = SavePlanner()
    for following in (state, like(state, data), like(state, data), state):
        writers: dict[str, Any] = {
            "world_size": world_size,
            "rank": data.draw(st.integers(0, world_size - 1)),
        }
        kept = outcome(planner, following, writers)
        assert kept == outcome(SavePlanner(), following, writers)


@pytest.mark.parametrize("dtype", by_dtype(), ids=str)
def test_small_tensors_of_each_type_are_copied_together(dtype: torch.dtype) -> None:
    raw = torch.arange(3 * 16, dtype=torch.uint8).view(3, 16) % 2
    state = [row.clone().view(dtype) for row in raw]
    planned = SavePlanner().plan(state, world_size=1, rank=0)
    memory = torch.zeros(48, dtype=torch.uint8)
    planned.copy_into(memory)
    assert memory.equal(raw.flatten())
    assert len(planned.plan.copies) == 1


def test_a_plan_is_kept_where_only_values_and_tensors_change() -> None:
    def state(step: int) -> dict[str, Any]:
        weights = {str(i): torch.full((2, 3), float(step)) for i in range(600)}
        return {"weights": weights, "tied": weights["3"], "step": step}

    planner = SavePlanner()
    first = planner.plan(state(1), world_size=2, rank=1)
    second = planner.plan(state(2), world_size=2, rank=1)
    assert second.plan is first.plan
    assert second.tree["dict"]["step"] == {"value": 2} and first.tree["dict"]["step"]["value"] == 1
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
