"""Coverage across storages: complete if and only if every part is in some reachable storage, and
unreadable, not damaged, if a storage that outlives its failure has what is missing."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kit.checkpoint_states import PartsInMemory

import checkpoints
from checkpoints.storage import PatientStorage, Storage
from checkpoints.testing import FaultyStorage, MemoryStorage
from checkpoints.tiers import TieredStorage

PLACES = 4
STEPS = (1, 2, 3)


@dataclass(frozen=True)
class History:
    world_size: int
    where: dict[tuple[int, int], set[int]]  # the storages of each rank's part of each step
    disks: set[int]  # the storages that are no memory of a node
    failing: set[int]  # a memory in all calls, a disk in those for files
    damaged: set[int]
    damage: str

    def is_among(self, step: int, rank: int, places: set[int]) -> bool:
        """Whether one of these storages holds the part."""
        return bool(self.where[step, rank] & places)

    def is_among_all(self, step: int, places: set[int]) -> bool:
        return all(self.is_among(step, rank, places) for rank in range(self.world_size))


@st.composite
def histories(draw: st.DrawFn) -> History:
    world_size = draw(st.integers(1, 5))
    places = st.sets(st.integers(0, PLACES - 1), max_size=PLACES)
    where = {
        (step, rank): draw(places.filter(bool) if draw(st.booleans()) else places)
        for step in STEPS
        for rank in range(world_size)
    }
    few = st.sets(st.integers(0, PLACES - 1), max_size=2)
    damage = draw(st.sampled_from(["bytes", "size", "part"]))
    return History(world_size, where, draw(few), draw(few), draw(few), damage)


def state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((11,), float(step)), "bias": torch.full((3,), step)}


def _with_a_damaged_copy_beside_an_unreadable_one(how: str) -> History:
    where: dict[tuple[int, int], set[int]] = {(step, 0): set() for step in STEPS}
    where[3, 0] = {0, 1}
    return History(1, where, disks={1}, failing={1}, damaged={0}, damage=how)


@given(history=histories())
@example(_with_a_damaged_copy_beside_an_unreadable_one("bytes"))
@example(_with_a_damaged_copy_beside_an_unreadable_one("size"))
@example(_with_a_damaged_copy_beside_an_unreadable_one("part"))
def test_the_newest_complete_checkpoint_is_found_and_loaded(history: History) -> None:
    places = [PartsInMemory() for _ in range(PLACES)]
    for (step, rank), at in history.where.items():
        for place in at:
            checkpoints.save(
                places[place],
                state(step),
                step=step,
                nonce="aa",
                rank=rank,
                world_size=history.world_size,
            )
    for place in history.damaged:
        _damage(places[place], history.damage)
    tiers = TieredStorage([_tier(history, n, place) for n, place in enumerate(places)])
    lost = history.failing - history.disks
    good = set(range(PLACES)) - history.failing - history.damaged
    whole = [step for step in STEPS if history.is_among_all(step, good)]
    found = checkpoints.latest(tiers)
    assert {s.name: s.is_unreadable for s in found.skipped} == {
        f"step-{step:09}.g0.aa": is_unreadable
        for step, is_unreadable in _skipped(history, good, lost).items()
        if step > max(whole, default=0)
    }
    if not whole:
        assert found.checkpoint is None
        return
    assert found.checkpoint is not None and found.checkpoint.step == max(whole)
    loaded = checkpoints.load(tiers, found.checkpoint.name).state
    assert all(torch.equal(loaded[key], value) for key, value in state(max(whole)).items())
    assert len({t.place for t in tiers.failures if "smokes" in t.reason}) >= min(len(lost), 1)


def _skipped(history: History, good: set[int], lost: set[int]) -> dict[int, bool]:
    """The listed checkpoints that cannot be loaded, and whether that may be different later."""
    listed = [s for s in STEPS if history.is_among_all(s, set(range(PLACES)) - lost)]
    unreadable = history.disks & history.failing
    return {
        step: any(
            not history.is_among(step, rank, good) and history.is_among(step, rank, unreadable)
            for rank in range(history.world_size)
        )
        for step in listed
        if not history.is_among_all(step, good)
    }


def _damage(storage: MemoryStorage, how: str) -> None:
    """Damage all files of tensors, or all parts."""
    for folder in storage.list(""):
        for file in storage.list(folder):
            if file.endswith(".json" if how == "part" else ".safetensors"):
                content = storage.contents(f"{folder}/{file}")
                content[-1] ^= 1
                del content[len(content) - (how == "size") :]


def _tier(history: History, number: int, storage: PartsInMemory) -> Storage:
    is_disk, is_failing = number in history.disks, number in history.failing

    def fail(label: str) -> None:
        if is_failing and not (is_disk and label.startswith("list ")):
            raise OSError(errno.EIO, "it smokes", label)

    faulty = FaultyStorage(storage, before=fail)
    return PatientStorage(faulty, patience_s=0) if is_disk else faulty
