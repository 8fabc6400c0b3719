"""Local nodes: output, exit codes, and no orphaned processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.cli import bound_to_parent, run
from elastic.cli.run import (
    CLI_BAR_S,
    LocalNodes,
    OutputLines,
    stop_on_signals,
)
from elastic.testing.waiting import eventually

# Starts a child in a session of its own, as torchrun does, and prints its process ID.
PARENT_WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


class Lines:
    """Collects the output of nodes."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, str]] = []

    def __call__(self, node: str, stream: str, line: str) -> None:
        self.all.append((node, stream, line))


def pump_until(nodes: LocalNodes, condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        nodes.pump(0.05)
        return condition()

    eventually(holds)


def is_alive(pid: int) -> bool:
    return bool(run.tree(pid))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def nodes(lines: Lines) -> Iterator[LocalNodes]:
    with LocalNodes(lines) as nodes:
        yield nodes


def python(code: str) -> list[str]:
    return [sys.executable, "-IS", "-c", code]


def test_complete_lines_arrive_with_node_and_stream(nodes: LocalNodes, lines: Lines) -> None:
    code = "import sys; print('out'); print('no end', end='', file=sys.stderr)"
    nodes.start("a", python(code), os.environ)
    nodes.start("b", python("print('b1\\nb2')"), os.environ)
    pump_until(nodes, lambda: not nodes.running)
    nodes.drain()
    assert sorted(lines.all) == [
        ("a", "stderr", "no end"),
        ("a", "stdout", "out"),
        ("b", "stdout", "b1"),
        ("b", "stdout", "b2"),
    ]
    assert [node.exit_code for node in nodes.nodes] == [0, 0]


def test_a_progress_bar_is_printed_now_and_then_and_at_its_end() -> None:
    lines = OutputLines()
    assert lines.feed(b"\r 1%", 0) == []
    assert lines.feed(b"\r 2%\r 3%", 0.1) == [" 2%"]
    assert lines.feed(b"\r 4%\r 5%", CLI_BAR_S) == []
    assert lines.feed(b"\r 6%\r", 0.1 + CLI_BAR_S) == [" 5%"]
    assert lines.feed(b"100%\r", 0.2 + CLI_BAR_S) == []
    assert lines.feed(b"\nnext\r\n", 0.2 + CLI_BAR_S) == ["100%", "next"]
    assert lines.feed(b"no \xff end", 100) == [] and lines.end() == ["no \ufffd end"]
    assert lines.end() == []


def test_output_that_a_terminal_cannot_show_ends_no_node() -> None:
    script = (
        "from elastic.cli import main; from elastic.cli.run import _print_line as show; "
        "main.main(['completion', 'bash']); show('local-0', 'stdout', 'bar: \u2588')"
    )
    for encoding in ("ascii", "latin-1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == b"[local-0] bar: \\u2588"


def test_each_node_has_its_own_environment(nodes: LocalNodes, lines: Lines) -> None:
    nodes.start("a", python("import os; print(os.environ['MARK'])"), {**os.environ, "MARK": "7"})
    pump_until(nodes, lambda: bool(lines.all))
    assert lines.all == [("a", "stdout", "7")]


def test_killing_a_node_ends_its_workers_in_their_own_sessions(
    nodes: LocalNodes, lines: Lines
) -> None:
    node = nodes.start("a", python(PARENT_WITH_CHILD), os.environ)
    pump_until(nodes, lambda: bool(lines.all))
    child = int(lines.all[0][2])
    assert is_alive(child)
    nodes.kill(node)
    assert node.exit_code == -signal.SIGKILL
    eventually(lambda: not is_alive(child))


def test_leaving_the_block_kills_running_nodes(lines: Lines) -> None:
    with LocalNodes(lines) as nodes:
        node = nodes.start("a", python("import time; time.sleep(600)"), os.environ)
        assert node.exit_code is None
    assert node.exit_code == -signal.SIGKILL


def test_a_signal_reaches_every_running_agent(nodes: LocalNodes) -> None:
    for name in ("a", "b"):
        nodes.start(name, python("import time; time.sleep(600)"), os.environ)
    nodes.signal(signal.SIGTERM)
    pump_until(nodes, lambda: not nodes.running)
    assert {node.exit_code for node in nodes.nodes} == {-signal.SIGTERM}


def test_a_node_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-IS",
                          {str(bound_to_parent.__file__)!r}, str(os.getpid()),
                          sys.executable, "-IS", "-c",
                          "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
time.sleep(600)
"""
    parent = subprocess.Popen(python(launcher), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        eventually(lambda: not is_alive(child))


def test_a_command_bound_to_a_dead_parent_does_not_start() -> None:
    dead_pid = 2**22  # above every pid_max
    done = subprocess.run(
        [sys.executable, "-IS", str(bound_to_parent.__file__), str(dead_pid), "echo", "started"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""


def test_a_signal_requests_a_stop_and_a_second_one_is_urgent() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)  # as under nohup
            seen = [(stop.signum, stop.urgent)]
            for signum in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), signum)
                seen.append((stop.signum, stop.urgent))
        assert seen == [(None, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, interrupt)


def test_no_more_nodes_start_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(nodes: LocalNodes, name: str, *_: object) -> None:
        started.append(name)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalNodes, "start", start)
    args = ["--embedded-etcd", "--nodes-local", "8", "--nnodes", "1:8", __file__]
    run.run_local(run.parse(args))
    assert started == ["local-0", "local-1"]


def test_the_tree_of_a_dead_process_is_empty() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert run.tree(process.pid) == ()
