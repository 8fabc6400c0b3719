"""Folders that other users may write to: existing names are neither followed nor reused."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.memory import NODE_FILE, MemoryHost, memory_roots
from elastic.link.link import LinkServer
from elastic.wire import base
from elastic.worker.node_first import node_first


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``/tmp`` in which another user may have created files; short, for socket paths."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield folder


ENVIRONMENT = {"TORCHELASTIC_RUN_ID": "job", "ELASTIC_NODE_ID": "n"}


def lock_of(shared: Path) -> Path:
    with node_first(0, ENVIRONMENT):
        pass
    (path,) = shared.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    return path


@pytest.mark.parametrize("target", ["a file of this user's", "nothing yet"])
def test_a_lock_is_not_created_through_a_symlink(shared: Path, tmp_path: Path, target: str) -> None:
    path, victim = lock_of(shared), tmp_path / "victim"
    if target != "nothing yet":
        victim.write_text("precious")
        victim.chmod(0o600)
    path.symlink_to(victim)
    with pytest.raises(PermissionError, match="is a link"), node_first(0, ENVIRONMENT):
        raise AssertionError("it went through the link")
    assert not victim.exists() or victim.read_text() == "precious"


@pytest.mark.parametrize("how", ["hard link", "open to others", "pipe", "folder"])
def test_an_unsafe_lock_file_is_rejected(shared: Path, tmp_path: Path, how: str) -> None:
    path, victim = lock_of(shared), tmp_path / "victim"
    match how:
        case "hard link":
            victim.touch(mode=0o600)
            path.hardlink_to(victim)
        case "open to others":
            path.touch()
            path.chmod(0o666)
        case "pipe":
            os.mkfifo(path, 0o600)
        case _:
            path.mkdir()
    with pytest.raises(OSError), node_first(0, ENVIRONMENT):
        raise AssertionError("it was taken")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    base.write(path, b"a key")
    assert base.read(path) == b"a key"
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        base.read(path)


def test_an_existing_path_is_never_overwritten(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "link").symlink_to(victim)
    for name in ("link", "victim"):
        with pytest.raises(FileExistsError):
            base.write(tmp_path / name, b"secret")
        victim.touch()
    assert victim.read_bytes() == b""


def test_the_link_folder_and_key_are_private_to_the_user(shared: Path) -> None:
    server = LinkServer(
        on_message=lambda worker, message: None,
        on_death=lambda worker, death: None,
        on_error=lambda error: None,
    )
    folder = Path(server.path).parent
    assert folder.parent == shared and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    server.close()
    assert list(shared.iterdir()) == []


def test_a_memory_folder_is_not_created_through_a_symlink(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "memory").symlink_to(victim)
    with pytest.raises(FileExistsError):
        MemoryHost(tmp_path / "memory", host="127.0.0.1")
    assert list(victim.iterdir()) == []


def test_the_memory_key_is_private_to_the_user(tmp_path: Path) -> None:
    host = MemoryHost(tmp_path / "memory", host="127.0.0.1")
    file = host.folder / NODE_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(host.folder.stat().st_mode) == 0o700
    file.chmod(0o644)
    with pytest.raises(PermissionError):
        memory_roots(host.folder)
    host.close()
