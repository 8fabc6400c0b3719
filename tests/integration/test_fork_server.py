"""A process of the fork server looks and ends like one that was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.testing.forks.server import ForkedPopen, ForkServer
from elastic.testing.processes import TOKEN, Process, marked_with
from elastic.testing.waiting import PATIENCE_S, eventually

# Everything that a process may ask about itself, and the product's modules that it has.
PROGRAM = """
import json, os, sys, threading
own = open("/proc/self/environ", "rb").read().rstrip(b"\\0").split(b"\\0")
print("to stderr", file=sys.stderr)
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__,
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "environ": dict(os.environ), "shown": sorted(map(os.fsdecode, own)),
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "cwd": os.getcwd(),
    "stdin": os.read(0, 1).decode(), "fds": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(), "tasks": len(os.listdir("/proc/self/task")),
    "elastic": sorted(m for m in sys.modules if m.startswith(("elastic.", "checkpoints", "grpc"))),
}))
"""
AGENT = ("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2")
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def start(server: ForkServer | None, folder: Path, *arguments: str, **env: str) -> Any:
    """The process; its output goes to ``output`` in the folder."""
    with (folder / "output").open("wb") as output:
        options: dict[str, Any] = {
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **env},
            "cwd": folder,
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        command = [sys.executable, *arguments]
        if server is None:
            return subprocess.Popen(command, **options)
        return ForkedPopen(server.client, command, **options)


def test_a_fork_looks_like_a_process_that_was_started(server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    told = []
    for by in (server, None):
        process = start(by, tmp_path, str(script), "--flag", "x y", SOME="of its own")
        assert process.wait(PATIENCE_S) == 0
        first, second = (tmp_path / "output").read_text().splitlines()
        assert first == "to stderr", "nothing is kept back"
        told.append(json.loads(second))
    forked, started = told
    # The fork server's own packages, and what torchrun imports by itself.
    imported = set(forked.pop("elastic")) - {
        "elastic.testing",
        "elastic.testing.forks",
        "elastic.rendezvous",
    }
    assert imported == {"elastic.rendezvous.entrypoint"}
    assert started.pop("elastic") == []
    assert forked == started
    assert forked["parent"] == os.getpid() and forked["session"] and forked["tasks"] == 1


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit, os; atexit.register(os._exit, 3)", 3),
        ("import threading, time, os\nthreading.Thread(target=lambda: os._exit(5)).start()", 5),
    ],
)
def test_it_ends_as_such_a_process_ends(
    server: ForkServer, tmp_path: Path, program: str, code: int
) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    assert start(server, tmp_path, str(script)).wait(PATIENCE_S) == code


def workers_of(token: str) -> list[Process]:
    return [p for p in marked_with(token) if "LOCAL_RANK" in p.environment]


@pytest.mark.cluster
def test_workers_of_an_agent_are_its_children_and_marked(
    server: ForkServer, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text("import time; time.sleep(600)")
    agent = start(server, tmp_path, *AGENT, *C10D, str(script), **{TOKEN: "a-fork/0"})
    try:
        workers = eventually(
            lambda: found if len(found := workers_of("a-fork")) == 2 else None, "two workers"
        )
        assert {w.parent for w in workers} == {agent.pid}
        assert {w.environment["LOCAL_RANK"] for w in workers} == {"0", "1"}
        assert all(str(script) in w.command for w in workers)
        assert len(marked_with("a-fork")) == 3, "an agent and its workers, and no server"
        agent.terminate()
        assert agent.wait(PATIENCE_S) == 1, (tmp_path / "output").read_text()
        assert marked_with("a-fork") == []
    finally:
        agent.kill()
        for left in marked_with("a-fork"):
            os.kill(left.pid, signal.SIGKILL)
