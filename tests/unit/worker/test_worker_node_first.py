"""One worker of a node runs first; its failure does not block the others."""

from __future__ import annotations

import fcntl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.worker.node_first import node_first

DEADLINE_S = 60.0
ENV = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield


def run_all(bodies: list[threading.Thread]) -> None:
    for body in bodies:
        body.start()
    for body in bodies:
        body.join(DEADLINE_S)
    assert not any(body.is_alive() for body in bodies)


def test_the_first_worker_runs_alone_and_the_others_concurrently() -> None:
    inside, finished = threading.Barrier(3), threading.Event()
    order: list[str] = []
    lock = threading.Lock()

    def worker() -> None:
        with node_first(1, ENV):
            with lock:
                first = not order
                order.append("in")
            if first:
                assert len(order) == 1
                finished.set()
                order.append("out")
            else:
                assert finished.is_set()
                inside.wait(DEADLINE_S)  # passes only if all three are inside at once

    run_all([threading.Thread(target=worker) for _ in range(4)])
    assert order[:2] == ["in", "out"]
    assert not inside.broken


def test_after_an_exception_the_next_worker_runs_first() -> None:
    with pytest.raises(OSError, match="no network"), node_first(1, ENV):
        raise OSError("no network")
    ran = []

    def second() -> None:
        with node_first(1, ENV):
            ran.append("second")

    run_all([threading.Thread(target=second)])
    assert ran == ["second"]


def test_every_use_has_its_own_first_worker(tmp_path: Path) -> None:
    with node_first(1, ENV):
        pass
    with node_first(2, ENV):
        (file,) = tmp_path.iterdir()
        with file.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
