"""Whom an agent does not listen to: strangers, impostors, other users, and too many of them."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from link_kit import DEADLINE_S, Agent, Processes, connect

from elastic.errors import LinkError
from elastic.link.protocol import (
    MAX_LINE,
    Beat,
    Hello,
    Message,
    Ready,
    WorldMessage,
    encode,
)


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
    client = connect(agent.server.path, beat_every_s=0.01)
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


WORLD = WorldMessage(
    generation=3,
    nonce="aa",
    member=True,
    rank=0,
    size=1,
    local_rank=0,
    local_size=1,
    node_rank=0,
    nodes=1,
    store_host="127.0.0.1",
    store_port=1,
    switch_at_step=None,
    state="active",
    lineage=(),
    cause="first",
    reason="",
    committed_step=None,
)
HELLO = Hello(version=1, pid=os.getpid(), local_rank=1, library="0")


@pytest.mark.parametrize(
    "sent",
    [
        [replace(HELLO, pid=1)],
        [HELLO, HELLO],
        [HELLO, WORLD],
    ],
    ids=["false-pid", "two-hellos", "agents-words"],
)
def test_a_worker_that_says_what_it_may_not_is_disconnected(
    agent: Agent, sent: list[Message]
) -> None:
    with socket.socket(socket.AF_UNIX) as worker:
        worker.settimeout(DEADLINE_S)
        worker.connect(agent.server.path)
        worker.sendall(b"".join(encode(message) for message in sent))
        while worker.recv(1 << 16):
            pass  # it was welcomed first
    assert not [m for _, m in agent.said.queue if isinstance(m, WorldMessage)]


def test_silent_strangers_are_disconnected(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.link.server.HELLO_WITHIN_S", 0.05)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(agent.server.path)
        client = connect(agent.server.path, beat_every_s=0.01)  # turns the server's thread
        assert stranger.recv(1) == b""
    agent.wait_for(Beat)
    client.close()


def test_connections_are_limited(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.link.server.MAX_CONNECTIONS", 3)
    client = connect(agent.server.path)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    for stranger in strangers:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(agent.server.path)
    for refused in strangers[2:]:
        assert refused.recv(1) == b""
    client.send(Ready())
    agent.wait_for(Ready)
    for stranger in strangers:
        stranger.close()
    client.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused(agent: Agent) -> None:
    os.chmod(Path(agent.server.path).parent, 0o755)
    os.chmod(agent.server.path, 0o777)
    pid = os.fork()
    if pid == 0:  # nothing but system calls: the fork of a process with threads
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(agent.server.path)
            try:
                stranger.sendall(encode(replace(HELLO, pid=os.getpid())))
                os._exit(len(stranger.recv(1)))
            except OSError:
                os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert agent.server.workers() == ()


def test_half_a_line_is_no_message(agent: Agent) -> None:
    hello = encode(Hello(version=1, pid=os.getpid(), local_rank=0, library="0"))
    with socket.socket(socket.AF_UNIX) as half:
        half.connect(agent.server.path)
        for byte in hello[:-1]:
            half.sendall(bytes([byte]))
        assert agent.said.empty()
        half.sendall(b"\n")
        agent.wait_for(Hello)


def test_a_second_worker_of_the_same_rank_is_refused(agent: Agent, processes: Processes) -> None:
    processes.worker(agent.server.path)
    agent.wait_for(Ready)
    with pytest.raises(LinkError, match="refused"):
        connect(agent.server.path)


def test_a_local_rank_belongs_to_its_process_not_to_its_connection(
    agent: Agent, processes: Processes
) -> None:
    process = processes.worker(agent.server.path, "close")
    agent.wait_for(Ready)
    with pytest.raises(LinkError, match="refused"):
        connect(agent.server.path)
    process.kill()
    agent.deaths.get(timeout=DEADLINE_S)
    connect(agent.server.path).close()


def test_a_successor_may_be_faster_than_the_news_of_a_death(
    agent: Agent, processes: Processes
) -> None:
    goes_on = threading.Event()
    agent.on_message = lambda message: isinstance(message, Ready) and goes_on.wait(DEADLINE_S)
    with socket.socket(socket.AF_UNIX) as successor:
        successor.settimeout(DEADLINE_S)
        successor.connect(agent.server.path)  # accepted before the worker is
        process = processes.worker(agent.server.path)
        agent.wait_for(Ready)
        successor.sendall(encode(replace(HELLO, local_rank=0)))
        process.kill()
        process.wait()
        goes_on.set()
        assert b"Welcome" in successor.recv(1 << 16)
    assert agent.deaths.get(timeout=DEADLINE_S).pid == process.pid
    assert [worker.pid for worker in agent.server.workers()] == [os.getpid()]


def test_connecting_twice_keeps_the_newer_connection(agent: Agent) -> None:
    first = connect(agent.server.path)
    second = connect(agent.server.path, beat_every_s=0.01)
    tokens = {agent.wait_for(Hello)[0].token for _ in range(2)}
    for _ in range(20):
        assert agent.wait_for(Beat)[0].token <= max(tokens)  # no third connection
    assert [worker.token for worker in agent.server.workers()] == [max(tokens)]
    first.close()
    second.close()
