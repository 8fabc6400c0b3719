"""An agent rejects invalid clients, impostors, other users, and excess connections."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from kit.assignments import assignment
from link_kit import DEADLINE_S, Agent, Processes, connect, hang_up
from raw_peer import is_hung_up_on, prove

from elastic.errors import LinkError
from elastic.link.link import (
    LIMITS,
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    Assignment,
    ClientHandshakeRequest,
    Heartbeat,
    Message,
    Ready,
    SigtermAnswer,
    encode,
    key_path,
    read_key,
)
from elastic.wire import base
from elastic.wire.base import AuthenticationError
from elastic.wire.handshake import ClientHandshake, SecretKey, frame


def connected(agent: Agent, *, proves: bool = True) -> socket.socket:
    """A raw connection from this process, on which a test sends arbitrary bytes."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DEADLINE_S)
    sock.connect(agent.server.path)
    if proves:
        prove(sock, read_key(agent.server.path))
    return sock


@pytest.mark.parametrize("proves", [False, True], ids=["stranger", "knows-the-key"])
@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\x00\xff\n",
        frame(b'{"type": "Ready"}'),
        frame(
            b'{"type": "ClientHandshakeRequest", "version": 99, "pid": 1, "local_rank": 0,'
            b' "library": "9"}',
        ),
        frame(b"x" * (MAX_MESSAGE + 1)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["binary", "no-hello", "other-version", "huge", "http"],
)
def test_invalid_clients_are_disconnected_without_side_effects(
    agent: Agent, sent: bytes, proves: bool
) -> None:
    client = connect(agent.server.path, heartbeat_every_s=0.01)
    with connected(agent, proves=proves) as stranger:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stranger.sendall(sent)
        assert is_hung_up_on(stranger)
    agent.wait_for(Heartbeat)
    client.close()


def test_a_client_without_the_link_key_is_disconnected(agent: Agent) -> None:
    with connected(agent, proves=False) as stranger, pytest.raises(AuthenticationError):
        prove(stranger, SecretKey.generate())
    with connected(agent, proves=False) as stranger:
        handshake = ClientHandshake(SecretKey.generate())
        stranger.sendall(frame(handshake.hello) + frame(bytes(32)) + frame(encode(HELLO)))
        assert is_hung_up_on(stranger)
    assert agent.said.empty()


def test_a_server_without_the_link_key_is_refused(agent: Agent) -> None:
    """Another process listens at the agent's path."""
    Path(key_path(agent.server.path)).unlink()
    base.write(key_path(agent.server.path), SecretKey.generate().text.encode())
    with pytest.raises(LinkError, match="is not this worker's agent"):
        connect(agent.server.path)
    assert agent.said.empty()


def test_a_deleted_key_file_is_restored_for_the_next_workers(agent: Agent) -> None:
    """systemd-tmpfiles deletes files that were unused for days, but not live sockets."""
    client = connect(agent.server.path, heartbeat_every_s=0.01)
    agent.wait_for(ClientHandshakeRequest)
    Path(key_path(agent.server.path)).unlink()
    hang_up(client, agent.server.path)
    agent.wait_for(ClientHandshakeRequest)  # a client that has read it needs no file
    agent.server.keep_key()
    assert Path(key_path(agent.server.path)).exists()
    agent.server.keep_key()
    client.close()
    connect(agent.server.path).close()


def test_a_deleted_folder_is_restored_for_the_next_workers(agent: Agent) -> None:
    """Some cleaners of the folder for temporary files delete live sockets, too."""
    heard: queue.Queue[Message] = queue.Queue()
    client = connect(agent.server.path, on_message=heard.put)
    agent.wait_for(ClientHandshakeRequest)
    shutil.rmtree(Path(agent.server.path).parent)
    agent.server.keep_key()
    agent.server.keep_key()
    agent.server.send(SigtermAnswer(leaving=True))
    assert heard.get(timeout=DEADLINE_S) == SigtermAnswer(leaving=True), "still connected"
    client.close()
    connect(agent.server.path).close()


def test_a_folder_that_others_can_enter_is_not_used(agent: Agent) -> None:
    folder = Path(agent.server.path).parent
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    folder.chmod(0o755)
    with pytest.raises(LinkError, match=r"cannot be restored.*\n.*exclude .*elastic-"):
        agent.server.keep_key()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("how", ["link", "open-to-others", "nonsense"])
def test_a_key_file_writable_by_others_is_refused(agent: Agent, how: str, tmp_path: Path) -> None:
    path = Path(key_path(agent.server.path))
    assert path.stat().st_mode & 0o777 == 0o600
    match how:
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "open-to-others":
            path.chmod(0o644)
        case _:
            path.write_text("nonsense")
    with pytest.raises(LinkError):
        connect(agent.server.path)


WORLD = assignment(3)
HELLO = ClientHandshakeRequest(version=PROTOCOL_VERSION, pid=os.getpid(), local_rank=1, library="0")


@pytest.mark.parametrize(
    "sent",
    [
        [replace(HELLO, pid=1)],
        [HELLO, HELLO],
        [HELLO, WORLD],
    ],
    ids=["false-pid", "two-hellos", "agents-words"],
)
def test_a_worker_that_sends_a_disallowed_message_is_disconnected(
    agent: Agent, sent: list[Message]
) -> None:
    with connected(agent) as worker:
        worker.sendall(b"".join(frame(encode(message)) for message in sent))
        while worker.recv(1 << 16):
            pass  # the handshake succeeded first
    assert not [m for _, m in agent.said.queue if isinstance(m, Assignment)]


def test_silent_clients_are_disconnected() -> None:
    agent = Agent(limits=replace(LIMITS, handshake_s=0.05))
    with connected(agent, proves=False) as stranger:
        assert is_hung_up_on(stranger)
    connect(agent.server.path).close()
    agent.close()


def test_unauthenticated_connections_do_not_block_a_worker() -> None:
    """The oldest unauthenticated connection is closed first."""
    agent = Agent(limits=replace(LIMITS, pending_connections=3))
    strangers = [connected(agent, proves=False) for _ in range(8)]
    client = connect(agent.server.path)
    client.send(Ready())
    agent.wait_for(Ready)
    assert is_hung_up_on(strangers[0])
    for stranger in strangers:
        stranger.close()
    client.close()
    agent.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused(agent: Agent) -> None:
    os.chmod(Path(agent.server.path).parent, 0o755)
    os.chmod(agent.server.path, 0o777)
    said = frame(ClientHandshake(read_key(agent.server.path)).hello)
    pid = os.fork()
    if pid == 0:  # system calls only, since this forks a process with threads
        code = 2
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(agent.server.path)
                code = 0
                stranger.sendall(said)
                code = len(stranger.recv(1))
        except OSError:
            pass
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert agent.server.workers() == ()


def test_an_incomplete_frame_is_not_delivered(agent: Agent) -> None:
    hello = frame(
        encode(
            ClientHandshakeRequest(
                version=PROTOCOL_VERSION, pid=os.getpid(), local_rank=0, library="0"
            )
        )
    )
    with connected(agent) as half:
        for byte in hello[:-1]:
            half.sendall(bytes([byte]))
        assert agent.said.empty()
        half.sendall(hello[-1:])
        agent.wait_for(ClientHandshakeRequest)


def test_a_second_worker_of_the_same_rank_is_refused(agent: Agent, processes: Processes) -> None:
    processes.worker(agent.server.path)
    agent.wait_for(Ready)
    with pytest.raises(LinkError, match=r"is pid \d+\n.* not for its child processes: .*main"):
        connect(agent.server.path)


def test_a_local_rank_is_bound_to_its_process_not_its_connection(
    agent: Agent, processes: Processes
) -> None:
    process = processes.worker(agent.server.path, "close")
    agent.wait_for(Ready)
    with pytest.raises(LinkError, match="refuses this worker"):
        connect(agent.server.path)
    process.kill()
    agent.deaths.get(timeout=DEADLINE_S)
    connect(agent.server.path).close()


def test_a_replacement_may_connect_before_the_death_is_reported(
    agent: Agent, processes: Processes
) -> None:
    goes_on = threading.Event()
    agent.on_message = lambda message: isinstance(message, Ready) and goes_on.wait(DEADLINE_S)
    with connected(agent) as successor:  # before the worker is
        process = processes.worker(agent.server.path)
        agent.wait_for(Ready)
        successor.sendall(frame(encode(replace(HELLO, local_rank=0))))
        process.kill()
        process.wait()
        goes_on.set()
        assert b"ClientHandshakeReply" in successor.recv(1 << 16)
    assert agent.deaths.get(timeout=DEADLINE_S).pid == process.pid
    assert [worker.pid for worker in agent.server.workers()] == [os.getpid()]


def test_connecting_twice_keeps_the_newer_connection(agent: Agent) -> None:
    first = connect(agent.server.path)
    second = connect(agent.server.path, heartbeat_every_s=0.01)
    tokens = {agent.wait_for(ClientHandshakeRequest)[0].token for _ in range(2)}
    for _ in range(20):
        assert agent.wait_for(Heartbeat)[0].token <= max(tokens)  # no third connection
    assert [worker.token for worker in agent.server.workers()] == [max(tokens)]
    first.close()
    second.close()
