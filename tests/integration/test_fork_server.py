"""A process of the fork server looks and exits like a spawned one."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import networks
import pytest

from elastic.testing.forks.program import run_program
from elastic.testing.forks.server import (
    SLOW_START,
    ForkedPopen,
    ForkServer,
    can_fork,
    shared_fork_server,
)
from elastic.testing.processes import TOKEN, Process, marked_with
from elastic.testing.waiting import PATIENCE_S, eventually

# Everything that a process can query about itself, and its imports of our packages and grpc.
PROGRAM = """
import json, os, sys, tempfile, threading
own = open("/proc/self/environ", "rb").read().rstrip(b"\\0").split(b"\\0")
print("to stderr", file=sys.stderr)
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__,
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "environ": dict(os.environ), "shown": sorted(map(os.fsdecode, own)),
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "cwd": os.getcwd(),
    "temporary": tempfile.gettempdir(), "stdin": os.read(0, 1).decode(),
    "fds": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(), "tasks": len(os.listdir("/proc/self/task")),
    "elastic": sorted(m for m in sys.modules if m.startswith(("elastic.", "checkpoints", "grpc"))),
}))
"""
TORCHRUN = ("-m", "torch.distributed.run")
ELASTIC_RUN = ("-m", "elastic.cli.main", "run")
ONE_NODE = ("--nnodes=1", "--nproc-per-node=2")
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")


@pytest.fixture(scope="module")
def server() -> ForkServer:
    """The shared server; a separate one if the tests start processes as in production."""
    return shared_fork_server() or ForkServer()


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


@pytest.mark.slow
def test_only_processes_of_a_slow_node_start_late(server: ForkServer, tmp_path: Path) -> None:
    delay_s, began_s = 0.3, {}
    for node in ("slow", "other"):
        asked_s = time.monotonic()
        command = ("-c", "import time; print(time.monotonic())")
        env = {SLOW_START: f"slow:{delay_s}", "ELASTIC_NODE_NAME": node}
        assert start(server, tmp_path, *command, **env).wait(PATIENCE_S) == 0
        began_s[node] = float((tmp_path / "output").read_text()) - asked_s
    assert began_s["slow"] >= delay_s
    assert began_s["other"] < began_s["slow"]


def test_a_fork_looks_like_a_spawned_process(server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    told = []
    for by in (server, None):
        own = {"SOME": "of its own", "TMPDIR": str(tmp_path)}
        process = start(by, tmp_path, str(script), "--flag", "x y", **own)
        assert process.wait(PATIENCE_S) == 0
        first, second = (tmp_path / "output").read_text().splitlines()
        assert first == "to stderr", "nothing is kept back"
        told.append(json.loads(second))
    forked, started = told
    imported = set(forked.pop("elastic"))
    assert {"elastic.train.run", "elastic.launcher.handler"} <= imported
    assert not {name for name in imported if name.startswith("grpc")}, "workers never have it"
    assert started.pop("elastic") == []
    assert forked == started
    assert forked["parent"] == os.getpid() and forked["session"] and forked["tasks"] == 1


ANSWERS = """
import sys
for line in sys.stdin:
    print(line.strip().upper(), flush=True)
print("the end", file=sys.stderr)
"""


def test_a_fork_communicates_through_pipes(server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ANSWERS)
    gc.collect()  # garbage of other tests must not close descriptors in the meantime
    before = os.listdir("/proc/self/fd")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, str(script)]
    with ForkedPopen(server.client, command, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"HELLO\n"
        assert process.communicate(b"you\n", timeout=PATIENCE_S) == (b"YOU\n", b"the end\n")
    assert process.returncode == 0
    assert os.listdir("/proc/self/fd") == before
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ForkedPopen(server.client, command, stdin=subprocess.DEVNULL, **both) as process:
        assert process.communicate(timeout=PATIENCE_S)[0] == b"the end\n"


INTERFACES = """
import json, os, socket
print(json.dumps([
    [name for _, name in socket.if_nameindex()], sorted(os.listdir("/sys/class/net")),
    os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/mnt") != OUTSIDE,
    open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[1:],
]))
"""


@pytest.mark.skipif(not networks.available(), reason="needs root, and `ip` of iproute2")
def test_a_fork_runs_in_the_network_namespace_of_its_launcher(
    server: ForkServer, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"OUTSIDE = {os.readlink('/proc/self/ns/mnt')!r}\n{INTERFACES}")
    with networks.Network(1, has_decoy=True) as network:
        (machine,) = network.machines
        command = [*machine.launcher, sys.executable, str(script)]
        assert can_fork(command, os.environ)
        started = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        with (tmp_path / "output").open("wb") as output:
            process = ForkedPopen(server.client, command, stdout=output, stderr=subprocess.STDOUT)
            code = process.wait(PATIENCE_S)
        forked = (tmp_path / "output").read_text()
    assert (code, forked) == (0, started)
    inside, shown, *_ = json.loads(forked)
    assert sorted(inside) == shown and "lo" in inside
    assert set(inside) != {name for _, name in socket.if_nameindex()}


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
def test_a_fork_exits_like_a_spawned_process(
    server: ForkServer, tmp_path: Path, program: str, code: int
) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    assert start(server, tmp_path, str(script)).wait(PATIENCE_S) == code


# The order in which the interpreter, and then the C runtime, shuts down.
ENDING = """
import atexit, ctypes, sys, threading, weakref

class Said:
    def __init__(self, name, held=None): self.name, self.held = name, held
    def __del__(self): print("freed", self.name, flush=True)

libc = ctypes.CDLL(None)
circle = Said("a circle"); circle.held = circle
of_main = Said("of main")
if "modules" in sys.argv:
    import contextlib, gc, json.encoder
    contextlib.added = ctypes.added = gc.added = None
    json.added = Said("what it has added to a module")
    json.encoder.INFINITY = Said("what it has changed in a module")
weakref.finalize(of_main, print, "finalizer", flush=True)
if "abort" in sys.argv:
    libc["__cxa_atexit"](libc.abort, None, None)
atexit.register(print, "atexit", flush=True)
libc.printf(b"buffered by C\\n")
threading.Thread(target=lambda: print("thread", flush=True)).start()
sys.exit(4)
"""


def test_a_fork_finalizes_its_objects_and_exits_normally(
    server: ForkServer, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(ENDING)
    ends = []
    for by in (server, None):
        code = start(by, tmp_path, str(script)).wait(PATIENCE_S)
        ends.append((code, (tmp_path / "output").read_text().splitlines()))
    forked, started = ends
    assert forked == started
    done = {"thread", "atexit", "finalizer", "freed of main", "freed a circle", "buffered by C"}
    assert forked[0] == 4 and set(forked[1]) == done
    assert start(server, tmp_path, str(script), "modules").wait(PATIENCE_S) == 4
    freed = {f"freed what it has {done} a module" for done in ("added to", "changed in")}
    output = (tmp_path / "output").read_text()
    assert freed <= set(output.splitlines()) and "Traceback" not in output
    # C exit handlers of the program are called: here, one that changes its exit code.
    assert start(server, tmp_path, str(script), "abort").wait(PATIENCE_S) == -signal.SIGABRT


@pytest.mark.slow
def test_a_fork_reacts_to_signals_that_the_server_s_parent_ignores(tmp_path: Path) -> None:
    """Tests may run in the background of a shell, or under nohup, and send these signals."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        server = ForkServer()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    listed = [*map(int, numbers)]
    code = f"import signal as s; print([s.getsignal(n) is s.SIG_IGN for n in {listed}])"
    try:
        process = ForkedPopen(server.client, [sys.executable, "-c", code], stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        server.close()
    assert output == b"[False, False, False]\n"


def test_a_completed_program_returns_its_exit_code_and_both_outputs(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\nprint(os.getcwd())\nprint('why', file=sys.stderr)\nsys.exit(3)"
    )
    done = run_program(
        [sys.executable, str(script)], os.environ, cwd=tmp_path, timeout_s=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{tmp_path}\n", "why\n")


def test_a_program_that_exceeds_its_timeout_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import time\ntime.sleep(600)")
    token = "stays-forked/0"
    with pytest.raises(subprocess.TimeoutExpired):
        run_program([sys.executable, str(script)], {**os.environ, TOKEN: token}, timeout_s=0.1)
    assert marked_with(token) == []


def workers_of(token: str) -> list[Process]:
    return [p for p in marked_with(token) if "LOCAL_RANK" in p.environment]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
        pytest.param(ELASTIC_RUN, id="elastic run"),
    ],
)
def test_workers_are_marked_children_of_their_agent(
    server: ForkServer, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    script = tmp_path / "program.py"
    script.write_text("import time; time.sleep(600)")
    command = (*launcher, *ONE_NODE, *C10D, str(script))
    agent = start(server, tmp_path, *command, **{TOKEN: "a-fork/0"})
    try:
        workers = eventually(
            lambda: found if len(found := workers_of("a-fork")) == 2 else None, "two workers"
        )
        assert {w.parent for w in workers} == {agent.pid}
        assert {w.environment["LOCAL_RANK"] for w in workers} == {"0", "1"}
        assert all(str(script) in w.command for w in workers)
        assert len(marked_with("a-fork")) == 3, "an agent and its workers, and no server"
        agent.terminate()
        code = 1 if launcher == TORCHRUN else 128 + signal.SIGTERM
        assert agent.wait(PATIENCE_S) == code, (tmp_path / "output").read_text()
        eventually(lambda: marked_with("a-fork") == [], "the end of its processes")
    finally:
        agent.kill()
        for left in marked_with("a-fork"):
            os.kill(left.pid, signal.SIGKILL)
