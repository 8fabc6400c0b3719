"""Coverage across storages: complete if and only if every part is in some reachable storage."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.checkpoint_states import PartsInMemory

import checkpoints
from checkpoints.storage import Storage
from checkpoints.testing import FaultyStorage, MemoryStorage
from checkpoints.tiers import TieredStorage

PLACES = 4
STEPS = (1, 2, 3)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, dict[tuple[int, int], set[int]], set[int], set[int]]:
    """World size, storages of each rank's part of each step, failing storages, damaged storages."""
    world_size = draw(st.integers(1, 5))
    places = st.sets(st.integers(0, PLACES - 1), max_size=PLACES)
    where = {
        (step, rank): draw(places.filter(bool) if draw(st.booleans()) else places)
        for step in STEPS
        for rank in range(world_size)
    }
    few = st.sets(st.integers(0, PLACES - 1), max_size=2)
    return world_size, where, draw(few), draw(few)


def state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((11,), float(step)), "bias": torch.full((3,), step)}


@given(history=histories())
def test_the_newest_complete_checkpoint_is_found_and_loaded(
    history: tuple[int, dict[tuple[int, int], set[int]], set[int], set[int]],
) -> None:
    world_size, where, failing, damaged = history
    places = [PartsInMemory() for _ in range(PLACES)]
    for (step, rank), at in where.items():
        for place in at:
            checkpoints.save(
                places[place], state(step), step=step, nonce="aa", rank=rank, world_size=world_size
            )
    for place in damaged:
        _damage_tensors(places[place])
    tiers = TieredStorage([_fails(p) if index in failing else p for index, p in enumerate(places)])
    good = set(range(PLACES)) - failing - damaged
    whole = [step for step in STEPS if all(where[step, rank] & good for rank in range(world_size))]
    found = checkpoints.latest(tiers)
    if not whole:
        assert found.checkpoint is None
        return
    assert found.checkpoint is not None and found.checkpoint.step == max(whole)
    loaded = checkpoints.load(tiers, found.checkpoint.name).state
    assert all(torch.equal(loaded[key], value) for key, value in state(max(whole)).items())
    assert len({t.place for t in tiers.failures if "smokes" in t.reason}) == min(len(failing), 1)


def _damage_tensors(storage: MemoryStorage) -> None:
    for folder in storage.list(""):
        for file in storage.list(folder):
            if file.endswith(".safetensors"):
                storage.contents(f"{folder}/{file}")[-1] ^= 1


def _fails(storage: Storage) -> FaultyStorage:
    def fail(label: str) -> None:
        raise OSError(5, "it smokes", label)

    return FaultyStorage(storage, before=fail)
