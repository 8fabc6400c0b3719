"""Failures of torch.distributed.checkpoint (DCP) that do not occur here: one test for each.

``examples/comparisons`` shows each of them in DCP.
"""

from __future__ import annotations

import math
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_states import flip, same, small_state

import checkpoints
from checkpoints import saving
from checkpoints.save_plan import SavePlanner
from checkpoints.saving import StagingBuffer

NAME = "step-000000001.g0.aa"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    checkpoints.save(root, small_state(1), step=1, nonce="aa")
    return root


def test_files_are_synced_after_they_are_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In DCP, the marker is synced while its bytes are in Python's buffer."""
    fsync, synced = os.fsync, {}

    def recording_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            synced[path.name.removesuffix(".tmp")] = path.read_bytes()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    name = checkpoints.save(root, small_state(2), step=2, nonce="aa").name
    manifest = (root / name / "manifest.json").read_bytes()
    assert manifest in [data for file, data in synced.items() if file.startswith(".manifest")]
    tensors = (root / name / "00000-of-00001.safetensors").read_bytes()
    assert synced["00000-of-00001.safetensors"] == tensors
    assert synced["part-00000-of-00001.json"].endswith(b"}\n")


def dies_at_sync(number: int, work: Callable[[], object]) -> bool:
    """Run in a child that dies at its ``number``-th fsync. Return whether it died."""
    pid = os.fork()
    if pid == 0:
        fsync, count = os.fsync, 0

        def deadly(descriptor: int) -> None:
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)
            fsync(descriptor)

        os.fsync = deadly  # type: ignore[assignment]
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_crash_during_another_save_never_mixes_steps(tmp_path: Path) -> None:
    """In DCP, saving into the same folder leaves tensors of two steps under one marker."""
    newest: list[int] = []
    died = True
    while died:
        root = tmp_path / str(len(newest))
        checkpoints.save(root, small_state(1), step=1, nonce="aa")
        died = dies_at_sync(
            len(newest) + 1,
            lambda root=root: checkpoints.save(root, small_state(2), step=2, nonce="aa"),  # type: ignore[misc]
        )
        for info in checkpoints.list_checkpoints(root):
            assert same(checkpoints.load(root, info.name).state, small_state(info.step))
        found = checkpoints.latest(root).checkpoint
        assert found is not None
        newest.append(found.step)
    assert newest == sorted(newest) and set(newest) == {1, 2} and len(newest) > 6


def test_every_flipped_bit_of_a_tensor_is_detected(root: Path) -> None:
    """In DCP, the tensor loads."""
    file = root / NAME / "00000-of-00001.safetensors"
    data = file.read_bytes()
    for at in range(0, len(data), 7):
        flip(file, at)
        live = small_state(0)
        with pytest.raises(checkpoints.CorruptCheckpoint):
            checkpoints.load(root, NAME, into=live)
        assert same(live, small_state(0))
        file.write_bytes(data)
    assert same(checkpoints.load(root, NAME).state, small_state(1))


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files to 64 KiB, so that writes fail as they do with a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_in_the_background_is_reported_without_a_commit(
    root: Path, small_files: None
) -> None:
    """In DCP, the thread dies, save returns, and the marker is published."""
    with checkpoints.Engine(root) as engine:
        world = checkpoints.WriterGroup(nonce="aa")
        state = {"large": torch.ones(100_000), "small": torch.ones(3)}
        outcome = engine.save_async(state, step=2, world=world).wait(60)
        assert outcome is not None and outcome.status is checkpoints.SaveStatus.FAILED
        assert isinstance(outcome.error, checkpoints.DiskFull)
        again = engine.save_async(small_state(3), step=3, world=world).wait(60)
    assert again is not None and again.status is checkpoints.SaveStatus.COMMITTED
    assert [info.step for info in checkpoints.list_checkpoints(root)] == [3, 1]


class Harm:
    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> Any:
        return (Path.touch, (self._victim,))


@pytest.mark.parametrize("file", ["manifest.json", "00000-of-00001.safetensors"])
def test_a_pickle_in_place_of_any_file_is_not_run(root: Path, tmp_path: Path, file: str) -> None:
    """In DCP, the marker is a pickle."""
    (root / NAME / file).write_bytes(pickle.dumps(Harm(tmp_path / "ran")))
    with pytest.raises(checkpoints.CorruptCheckpoint, match=file):
        checkpoints.load(root, NAME)
    assert checkpoints.latest(root).checkpoint is None
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Harm(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()  # it runs if it is loaded


def test_each_rank_stages_only_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """In DCP, each rank stages the full state, then drops what others write."""
    state = {f"tensor{i}": torch.full((10_000,), i) for i in range(8)}
    total = sum(tensor.nbytes for tensor in state.values())
    allocated: list[int] = []

    def recording_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        allocated.append(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(saving, "empty", recording_empty)
    for rank in range(4):
        group = checkpoints.WriterGroup(nonce="n", rank=rank, size=4)
        StagingBuffer().fill(SavePlanner(), state, group)
    assert len(allocated) == 4 and max(allocated) <= total / 4 + 16
