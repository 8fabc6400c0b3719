"""Agent and worker on a real socket, with real processes that are killed and stopped."""

from __future__ import annotations

import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import LinkError
from elastic.link.client import LinkClient
from elastic.link.protocol import (
    MAX_LINE,
    Beat,
    Bye,
    Entered,
    Hello,
    Message,
    Ready,
    SigtermAnswer,
    encode,
)
from elastic.link.server import LinkServer, Worker, WorkerDeath

DEADLINE_S = 20.0

WORKER = """
import os, sys, time
from elastic.link.client import LinkClient
from elastic.link.protocol import Beat, Bye, Ready
client = LinkClient.connect(
    sys.argv[1], local_rank=int(sys.argv[2]), on_message=lambda m: print("got", m, flush=True),
    on_agent_death=lambda: os._exit(9), beat=lambda: Beat(
        generation=1, step=2, phase="step", step_time_s=0.5),
)
client.send(Ready())
what = sys.argv[3]
if what == "fork":
    for _ in range(2):
        if os.fork() == 0:
            while True:
                pass
    print("forked", flush=True)
elif what == "bye":
    client.send(Bye(clean=True, error=""))
    client.close()
    sys.exit(3)
elif what == "close":
    client.close()
time.sleep(600)
"""


class Agent:
    """A server that remembers what it heard."""

    def __init__(self) -> None:
        self.said: queue.Queue[tuple[Worker, Message]] = queue.Queue()
        self.deaths: queue.Queue[WorkerDeath] = queue.Queue()
        self.errors: list[BaseException] = []
        self.server = LinkServer(
            on_message=lambda worker, message: self.said.put((worker, message)),
            on_death=lambda worker, death: self.deaths.put(death),
            on_error=self.errors.append,
        )
        self.server.start()

    def wait_for(self, kind: type[Any]) -> tuple[Worker, Any]:
        while True:
            worker, message = self.said.get(timeout=DEADLINE_S)
            if isinstance(message, kind):
                return worker, message


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.server.close()
    assert made.errors == []


@pytest.fixture
def start(agent: Agent) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def make(what: str = "", local_rank: int = 0, path: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, path or agent.server.path, str(local_rank), what],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield make
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def connect(agent: Agent, **more: Any) -> LinkClient:
    settings: dict[str, Any] = {
        "local_rank": 0,
        "on_message": lambda message: None,
        "on_agent_death": lambda: None,
        "beat": lambda: Beat(generation=0, step=0, phase="other", step_time_s=0.0),
        **more,
    }
    return LinkClient.connect(agent.server.path, **settings)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_socket_is_for_this_user_alone(agent: Agent) -> None:
    folder = Path(agent.server.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    agent.server.close()
    assert not folder.exists()


def test_messages_go_both_ways_in_order(agent: Agent) -> None:
    heard: queue.Queue[Message] = queue.Queue()
    client = connect(agent, on_message=heard.put)
    for step in range(100):
        client.send(Entered(generation=1, step=step))
    steps = [agent.wait_for(Entered)[1].step for _ in range(100)]
    assert steps == list(range(100))
    for leaving in (True, False):
        agent.server.send(SigtermAnswer(leaving=leaving))
    assert [heard.get(timeout=DEADLINE_S) for _ in range(2)] == [
        SigtermAnswer(leaving=True),
        SigtermAnswer(leaving=False),
    ]
    client.close()


def test_it_beats(agent: Agent) -> None:
    client = connect(agent, beat_every_s=0.01)
    for _ in range(3):
        agent.wait_for(Beat)
    client.close()


def test_a_death_is_told_at_once_whatever_its_children_hold(
    agent: Agent, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("fork")
    assert process.stdout is not None
    process.stdout.readline()
    agent.wait_for(Ready)
    began = time.monotonic()
    process.kill()
    death = agent.deaths.get(timeout=DEADLINE_S)
    assert time.monotonic() - began < 1.0  # the children live for ever
    assert (death.pid, death.signal, death.exit_code) == (process.pid, signal.SIGKILL, None)


def test_the_last_words_and_the_exit_code_come_with_the_death(
    agent: Agent, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("bye")
    death = agent.deaths.get(timeout=DEADLINE_S)
    assert death == WorkerDeath(process.pid, 3, None, Bye(clean=True, error=""))
    assert process.wait() == 3  # left to its parent to reap


def test_a_worker_without_a_connection_is_still_watched(
    agent: Agent, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("close")
    agent.wait_for(Ready)
    process.kill()
    assert agent.deaths.get(timeout=DEADLINE_S).pid == process.pid


def test_a_worker_ends_with_its_agent(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    code = """
    import sys, time
    from elastic.link.server import LinkServer
    server = LinkServer(on_message=lambda w, m: print(type(m).__name__, flush=True),
                        on_death=lambda w, d: None, on_error=lambda e: None)
    server.start()
    print(server.path, flush=True)
    time.sleep(600)
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        worker = start("fork", path=agent.stdout.readline().strip())
        assert worker.stdout is not None
        worker.stdout.readline()
    finally:
        agent.kill()
        agent.wait()
    assert worker.wait(timeout=1.0 + DEADLINE_S) == 9


def test_a_stopped_worker_holds_up_nobody(
    agent: Agent, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start()
    stopped, _ = agent.wait_for(Ready)
    os.kill(process.pid, signal.SIGSTOP)
    for _ in range(50_000):
        agent.server.send(SigtermAnswer(leaving=True), stopped)
    client = connect(agent, local_rank=1)
    client.send(Entered(generation=1, step=1))
    assert agent.wait_for(Entered)[0].local_rank == 1
    client.close()
    os.kill(process.pid, signal.SIGCONT)
    # It was disconnected for not reading, and says hello again.
    assert agent.wait_for(Hello)[0].pid in (process.pid, os.getpid())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\n",
        b'{"type": "Ready"}\n',
        b'{"type": "Hello", "version": 99, "pid": 1, "local_rank": 0, "library": "9"}\n',
        b"x" * (MAX_LINE + 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["binary", "no-hello", "other-version", "huge", "http"],
)
def test_strangers_are_disconnected_and_nothing_else_happens(agent: Agent, sent: bytes) -> None:
    client = connect(agent, beat_every_s=0.01)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(agent.server.path)
        try:
            stranger.sendall(sent)
            answer = stranger.recv(1)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        assert answer == b""
    agent.wait_for(Beat)
    client.close()


def test_half_a_line_is_no_message(agent: Agent) -> None:
    hello = encode(Hello(version=1, pid=os.getpid(), local_rank=0, library="0"))
    with socket.socket(socket.AF_UNIX) as half:
        half.connect(agent.server.path)
        for byte in hello[:-1]:
            half.sendall(bytes([byte]))
        assert agent.said.empty()
        half.sendall(b"\n")
        agent.wait_for(Hello)


def test_a_second_worker_of_the_same_rank_is_refused(
    agent: Agent, start: Callable[..., subprocess.Popen[str]]
) -> None:
    start()
    agent.wait_for(Ready)
    with pytest.raises(LinkError, match="refused"):
        connect(agent)


def test_connecting_twice_keeps_the_newer_connection(agent: Agent) -> None:
    first = connect(agent)
    second = connect(agent, beat_every_s=0.01)
    agent.wait_for(Beat)
    assert len(agent.server.workers()) == 1
    first.close()
    second.close()


def test_nobody_there_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.link.client.CONNECT_WITHIN_S", 0.1)
    agent = Agent()
    agent.server.close()
    with pytest.raises(LinkError, match="does not answer"):
        connect(agent)


def test_threads_end_with_their_owners(agent: Agent) -> None:
    client = connect(agent)
    client.close()
    client.close()
    agent.server.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("elastic-link")]
