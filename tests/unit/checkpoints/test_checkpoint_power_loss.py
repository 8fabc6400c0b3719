"""The order of fsyncs, tested by a simulated power loss after every call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.checkpoint_states import same, small_state

import checkpoints
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash, StorageFault


def _history(storage: FaultyStorage, committed: list[int]) -> None:
    """Three steps by two writers; notes each step whose save returned as committed."""
    for step in (1, 2, 3):
        for rank in (0, 1):
            saved = checkpoints.save(
                storage,
                small_state(step),
                step=step,
                nonce="aa",
                rank=rank,
                world_size=2,
                keep=checkpoints.LatestN(2),
            )
            if saved.committed:
                committed.append(step)


@pytest.mark.parametrize("names_survive", [True, False])
def test_a_power_loss_after_any_call_loses_no_committed_checkpoint(names_survive: bool) -> None:
    counted = FaultyStorage(MemoryStorage())
    _history(counted, [])
    for at in range(len(counted.calls)):
        memory, committed = MemoryStorage(), list[int]()
        with pytest.raises(SimulatedCrash):
            _history(FaultyStorage(memory, at=at, fault=StorageFault.DIE_AFTER), committed)
        left = memory.after_power_cut(names_survive=names_survive)
        for _ in range(2):  # as found, and after garbage collection at the next start
            listed = checkpoints.list_checkpoints(left)
            for info in listed:
                assert same(checkpoints.load(left, info.name).state, small_state(info.step))
            found = checkpoints.latest(left)
            assert found.skipped == (), counted.calls[at]
            if committed:
                assert found.checkpoint is not None, counted.calls[at]
                assert found.checkpoint.step >= committed[-1]
            checkpoints.collect_garbage(left, generation=1, nonce="bb")
    assert len(counted.calls) > 80


def test_the_fake_storage_loses_unsynced_data() -> None:
    """Otherwise the test above would pass without any fsync."""
    storage = MemoryStorage()
    storage.make_folder("folder")
    storage.create("folder/file").write(b"data")
    assert storage.after_power_cut(names_survive=True).size("folder/file") == 0
    assert storage.after_power_cut(names_survive=False).list("") == []


def test_local_storage_syncs_after_flushing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file synced while its data is still in a buffer has 0 bytes on disk [measured]."""
    sizes = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    sink = checkpoints.LocalStorage(tmp_path).create("file")
    sink.write(b"x" * 1979)
    sink.sync()
    sink.close()
    assert sizes == [1979]
