"""Several tiers, each with its own policy; a failing tier loses only its own saves."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from kit.checkpoint_states import same, small_state

import checkpoints
from checkpoints import (
    EverySeconds,
    EverySteps,
    LatestN,
    NodeMemory,
    OnPreemption,
    SaveStatus,
    Tier,
    TieredEngine,
    TieredStorage,
)
from checkpoints.testing import FaultyStorage, MemoryStorage

LONG_S = 90.0
ALONE = checkpoints.WriterGroup(nonce="aa")


def train(engine: TieredEngine, steps: range) -> None:
    for step in steps:
        engine.save_async(small_state(step), step=step, world=ALONE, tiers=engine.due(step))
        assert engine.wait(LONG_S)


def steps_of(root: checkpoints.Root) -> list[int]:
    return [info.step for info in checkpoints.list_checkpoints(root)]


def test_memory_is_saved_often_and_disk_rarely(tmp_path: Path) -> None:
    memory, disk = NodeMemory(tmp_path / "memory"), tmp_path / "disk"
    tiers = [
        Tier(memory, EverySteps(2)),
        Tier(disk, EverySteps(6) | OnPreemption(), keep=LatestN(2)),
    ]
    with TieredEngine(tiers) as engine:
        train(engine, range(1, 22))
        assert engine.due(21, preempted=True) == (1,)
        ended = engine.outcomes()
    assert steps_of(TieredStorage([memory])) == [20, 18, 16]
    assert steps_of(disk) == [18, 12]
    assert {t.place for t in ended} == {str(tmp_path / "memory"), str(disk)}
    assert all(t.outcome.status is SaveStatus.COMMITTED for t in ended)
    both = TieredStorage([memory, disk])
    newest = checkpoints.latest(both).checkpoint
    assert newest is not None and newest.step == 20
    assert same(checkpoints.load(both, newest.name).state, small_state(20))


def test_a_tier_that_hangs_does_not_block_another() -> None:
    gate = threading.Event()

    def hang(label: str) -> None:
        if label.startswith("write"):
            assert gate.wait(LONG_S)

    disk, memory = MemoryStorage(), MemoryStorage()
    tiers = [
        Tier(FaultyStorage(disk, before=hang), EverySteps(1)),
        Tier(memory, EverySteps(1)),
    ]
    with TieredEngine(tiers) as engine:
        for step in range(1, 6):
            handles = engine.save_async(
                small_state(step), step=step, world=ALONE, tiers=engine.due(step)
            )
            assert handles[1].wait(LONG_S) is not None
        assert steps_of(memory) == [5, 4, 3]
        skipped = [t.outcome.step for t in engine.outcomes() if t.tier == 0]
        assert skipped == [3, 4, 5]  # steps 1 and 2 hold both buffers
        gate.set()
    assert steps_of(disk) == [2, 1]


def test_policies_that_use_the_clock_need_agreement() -> None:
    now_s = [0.0]
    tiers = [Tier(MemoryStorage(), EverySteps(5)), Tier(MemoryStorage(), EverySeconds(60.0))]
    with TieredEngine(tiers, began_at_step=3, monotonic=lambda: now_s[0]) as engine:
        assert engine.needs_agreement
        assert engine.due(4) == ()
        now_s[0] = 61.0
        assert engine.due(5) == (0, 1)
        engine.save_async(small_state(5), step=5, world=ALONE, tiers=(1,))
        assert engine.due(6) == ()
        assert engine.due(10) == (0,)
    with TieredEngine(tiers[:1]) as engine:
        assert not engine.needs_agreement
    with pytest.raises(checkpoints.ArgumentError, match="at least one"):
        TieredEngine([])
