"""Programs with forked workers: terminated and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.membership.records import Keys
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.forks.program import start_python
from elastic.testing.processes import is_alive
from elastic.testing.waiting import eventually

PROGRAM = Path(__file__).parent / "forking_program.py"
PATIENCE_S = 180.0  # a restart that needs SIGKILL takes 30 s more


class Program:
    """A program that launches two forked workers, and forks a process of its own."""

    def __init__(self, folder: Path, etcd: EmbeddedEtcd, root: str, *how: str) -> None:
        self.folder = folder
        self.keys = Keys.of(root.rstrip("/"), "forked")
        arguments = [etcd.endpoint, root.rstrip("/"), "forked", str(folder), *how]
        with (folder / "log").open("w") as log:
            self.process = start_python(
                [sys.executable, str(PROGRAM), *arguments],
                env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def noted(self, name: str) -> str:
        """The text that a process has noted, once it is there."""
        file = self.folder / name
        eventually(
            lambda: file.exists() or self.process.poll() is not None, name, within_s=PATIENCE_S
        )
        assert file.exists(), f"{name}: the program ended first\n{self.log}"
        return file.read_text()

    def pid(self, name: str) -> int:
        return int(self.noted(name).split()[0])

    def workers(self) -> list[int]:
        """The workers that keep running."""
        return [self.pid(name) for name in ("worker-0-1", "worker-1-1")]

    def left(self) -> list[str]:
        return [name for name in os.listdir(self.folder) if name.startswith("elastic-")]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def launch(
    tmp_path: Path, shared_etcd: EmbeddedEtcd, root: str
) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*how: str) -> Program:
        started.append(Program(tmp_path, shared_etcd, root, *how))
        return started[-1]

    yield start
    for program in started:
        program.end()


def test_only_the_workers_end_with_a_killed_program(
    launch: Callable[..., Program],
) -> None:
    program = launch("stubborn")
    workers = [*program.workers(), program.pid("child of worker")]
    bystander = program.pid("bystander")
    # At the restart they ended by SIGTERM, like spawned processes.
    assert program.noted("worker-1-0").split()[1] == program.noted("worker-1-1").split()[1] == "0"
    assert "forcefully exiting via" not in program.log
    assert program.noted("bystander").split()[1] == "of_the_program"
    os.kill(program.process.pid, signal.SIGKILL)
    program.process.wait()
    eventually(lambda: not any(map(is_alive, workers)), "no worker is left", within_s=PATIENCE_S)
    eventually(lambda: program.left() == [], "its folders are gone", within_s=PATIENCE_S)
    assert is_alive(bystander)


@pytest.mark.parametrize(
    "told", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_launch_but_not_the_program(
    launch: Callable[..., Program],
    told: signal.Signals,
    shared_etcd: EmbeddedEtcd,
    connect: Callable[..., EtcdStore],
) -> None:
    program = launch()
    workers, bystander = program.workers(), program.pid("bystander")
    os.kill(program.process.pid, told)
    assert program.noted("raised") == told.name
    assert program.noted("threads") == ""
    assert program.noted("heard") == "SIGTERM"
    program.noted("interrupted")
    assert not any(map(is_alive, workers))
    assert program.left() == []
    store = connect(shared_etcd.endpoint)
    left = store.list(program.keys.nodes).entries
    assert all(not entry.lease_id for entry in left), "at most a record that the node has left"
    assert store.get(program.keys.done) is None
    program.process.wait(PATIENCE_S)
    assert is_alive(bystander)
