"""Liveness over real sockets: hello, close, probe, garbage."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from elastic.agent.liveness import MAX_LINE, LivenessServer, probe
from elastic.coordination.membership import Liveness

DEADLINE_S = 5.0


class Agent:
    """A liveness server and the queue of what it reports."""

    def __init__(self, node_id: str) -> None:
        self.closed: queue.Queue[tuple[str, bool]] = queue.Queue()
        self.server = LivenessServer(node_id, "127.0.0.1", lambda n, w: self.closed.put((n, w)))
        self.server.start()


@pytest.fixture
def leader() -> Iterator[Agent]:
    agent = Agent("leader")
    yield agent
    agent.server.close()


@pytest.fixture
def follower() -> Iterator[Agent]:
    agent = Agent("follower")
    yield agent
    agent.server.close()


def ask(port: int, node_id: str, timeout_s: float = DEADLINE_S) -> Liveness:
    return probe("127.0.0.1", port, node_id, timeout_s=timeout_s).liveness


def test_probe_tells_alive_replaced_and_dead(leader: Agent) -> None:
    port = leader.server.port
    assert ask(port, "leader") is Liveness.ALIVE
    assert ask(port, "its predecessor") is Liveness.DEAD
    leader.server.close()
    assert ask(port, "leader") is Liveness.DEAD


def test_silence_is_no_proof() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask(silent.getsockname()[1], "x", timeout_s=0.05) is Liveness.SUSPECT


def test_a_stranger_on_the_port_is_no_proof() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        import threading

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer, name="stranger")
        thread.start()
        assert ask(stranger.getsockname()[1], "x") is Liveness.SUSPECT
        thread.join()


def test_both_sides_hear_of_a_close(leader: Agent, follower: Agent) -> None:
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    # The leader knows the follower's name once it has answered a later probe in order.
    assert ask(leader.server.port, "leader") is Liveness.ALIVE
    leader.server.close()
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)


def test_leader_hears_of_a_followers_end(leader: Agent, follower: Agent) -> None:
    with socket.create_connection(("127.0.0.1", leader.server.port)) as connection:
        connection.sendall(b'{"hello": "n1"}\n')
        assert b"leader" in connection.recv(100)
    assert leader.closed.get(timeout=DEADLINE_S) == ("n1", False)


def test_following_a_refusing_leader_is_reported(follower: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    follower.server.follow("leader", "127.0.0.1", port)
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)


def test_dropping_the_leader_on_purpose_is_not_reported(follower: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower.server.follow("leader", "127.0.0.1", listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(100) == b'{"hello": "follower"}\n'
            follower.server.unfollow()
            assert connection.recv(100) == b""
    follower.server.close()
    assert follower.closed.empty()


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xfe\n", b"[1, 2]\n", b"x" * (2 * MAX_LINE), b"[" * 900 + b"\n", b'{"hello": "a'],
)
def test_garbage_closes_that_connection_and_harms_nothing(leader: Agent, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", leader.server.port)) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(DEADLINE_S)
        try:
            assert connection.recv(100) == b""
        except ConnectionResetError:
            pass
    assert ask(leader.server.port, "leader") is Liveness.ALIVE
    assert leader.closed.empty()
