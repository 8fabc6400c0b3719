"""A disk that is actually full, a file size limit, and an unwritable folder."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import checkpoints

NOBODY = 65534


def _state(step: int, count: int = 1000) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((count,), float(step))}


def _message_of(work: Callable[[], object]) -> str:
    """Run ``work`` in a fork, which may drop privileges; return its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "nothing was raised"
        try:
            torch.set_num_threads(1)
            work()
        except checkpoints.CheckpointError as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here (needs root): {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_fails_only_the_current_save(small_disk: Path, world_size: int) -> None:
    def save(step: int, count: int) -> None:
        for rank in range(world_size):
            checkpoints.save(
                small_disk,
                _state(step, count),
                step=step,
                nonce="aa",
                rank=rank,
                world_size=world_size,
                keep=checkpoints.LatestN(1),
            )

    save(1, 50_000)
    with pytest.raises(checkpoints.DiskFull, match="older checkpoints are unchanged"):
        save(2, 250_000)
    assert [info.step for info in checkpoints.list_checkpoints(small_disk)] == [1]
    found = checkpoints.latest(small_disk).checkpoint
    assert found is not None
    assert found.step == 1
    save(3, 60_000)  # enough space: the failed save released its part
    assert [info.step for info in checkpoints.list_checkpoints(small_disk)] == [3]
    assert [path.name for path in small_disk.glob(".tmp-*")] == []


def test_a_file_size_limit_is_reported_as_disk_full(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, _state(1), step=1, nonce="aa")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        checkpoints.save(tmp_path, _state(2, 100_000), step=2, nonce="aa")

    assert _message_of(limited).startswith("DiskFull: no space to save into")
    assert [info.step for info in checkpoints.list_checkpoints(tmp_path)] == [1]
    assert list(tmp_path.glob(".tmp-*")) == []


def test_an_unwritable_folder_fails_the_save(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    checkpoints.save(root, _state(1), step=1, nonce="aa")
    for folder in (tmp_path, *tmp_path.parents):
        if os.geteuid() == 0 and folder.stat().st_uid == 0 and "pytest" in folder.name:
            folder.chmod(0o755)
    root.chmod(0o555)

    def as_nobody() -> None:
        if os.geteuid() == 0:  # root may write anywhere
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        checkpoints.save(root, _state(2), step=2, nonce="aa")

    message = _message_of(as_nobody)
    root.chmod(0o755)
    assert message.startswith(f"NotWritable: cannot write into {root}: Permission denied")
    assert "Use a folder that every writer has permission to write" in message
    assert [info.step for info in checkpoints.list_checkpoints(root)] == [1]


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_file_in_place_of_the_folder_fails_the_save(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    root = tmp_path / "file" / below
    with pytest.raises(checkpoints.NotWritable):
        checkpoints.save(root, _state(1), step=1, nonce="aa")
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_parent_folders_are_created(tmp_path: Path) -> None:
    saved = checkpoints.save(tmp_path / "a" / "b" / "c", _state(1), step=1, nonce="aa")
    assert saved.committed
