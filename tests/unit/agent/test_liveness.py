"""Liveness over real sockets: handshake, close, probe, garbage."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kit.manual_clock import ManualClock
from raw_peer import is_hung_up_on, prove, receive_frame, serve

from elastic.agent.liveness import (
    HEARTBEAT_S,
    LIMITS,
    MAX_WORLD,
    Heartbeats,
    LivenessCallbacks,
    LivenessServer,
    NodeHeartbeat,
    Verdict,
    probe,
)
from elastic.membership.view import Liveness
from elastic.tuning.intervals import (
    RECENT_LOSS_S,
)
from elastic.wire.base import AuthenticationError
from elastic.wire.handshake import ClientHandshake, Credentials, SecretKey, frame

DEADLINE_S = 30.0
KEY = SecretKey.generate()


class Agent:
    """A liveness server and the queues of its reports."""

    def __init__(self, node_id: str) -> None:
        self.closed: queue.Queue[tuple[str, bool]] = queue.Queue()
        self.opened: queue.Queue[tuple[str, bool]] = queue.Queue()
        self.dropped: queue.Queue[str] = queue.Queue()
        self.worlds: queue.Queue[bytes] = queue.Queue()
        self.heard: queue.Queue[tuple[str, NodeHeartbeat]] = queue.Queue()
        self.errors: list[BaseException] = []
        self.server = LivenessServer(
            "127.0.0.1",
            LivenessCallbacks(
                on_opened=lambda n, w: self.opened.put((n, w)),
                on_closed=lambda n, w: self.closed.put((n, w)),
                on_silent=lambda n, w: self.closed.put((n, w)),
                on_dropped=self.dropped.put,
                on_world=self.worlds.put,
                on_heartbeat=lambda n, beat: self.heard.put((n, beat)),
                on_error=self.errors.append,
            ),
            credentials=Credentials(key=lambda: KEY, identity=node_id),
        )
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


def verdict_of(port: int, node_id: str, timeout_s: float = DEADLINE_S) -> Verdict:
    return probe("127.0.0.1", port, node_id, key=KEY, timeout_s=timeout_s)


def ask(port: int, node_id: str, timeout_s: float = DEADLINE_S) -> Liveness:
    return verdict_of(port, node_id, timeout_s).liveness


def refuses(port: int, node_id: str) -> bool:
    verdict = verdict_of(port, node_id)
    assert verdict.liveness is not Liveness.DEAD, "a refusal alone is no proof"
    return verdict.refused


def test_a_probe_distinguishes_alive_replaced_and_refused(leader: Agent) -> None:
    port = leader.server.port
    assert ask(port, "leader") is Liveness.ALIVE
    assert not refuses(port, "leader")
    assert refuses(port, "its predecessor")
    leader.server.close()
    assert refuses(port, "leader")


def test_a_timeout_proves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ask(silent.getsockname()[1], "x", timeout_s=0.05) is Liveness.SUSPECT


def test_another_service_on_the_port_proves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer, name="stranger")
        thread.start()
        assert ask(stranger.getsockname()[1], "x") is Liveness.SUSPECT
        thread.join()


def test_an_agent_without_the_runs_secret_proves_nothing() -> None:
    """Another run's agent, or an impostor, proves neither life nor death."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection, pytest.raises(ConnectionResetError):
                serve(connection, SecretKey.generate(), "x")

        thread = threading.Thread(target=answer, name="stranger")
        thread.start()
        verdict = verdict_of(stranger.getsockname()[1], "x")
        thread.join()
    assert verdict.liveness is Liveness.SUSPECT and not verdict.refused
    assert "has not proved" in verdict.reason


def test_both_sides_report_a_close(leader: Agent, follower: Agent) -> None:
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    # The leader knows the follower's name once it has answered a later probe in order.
    assert ask(leader.server.port, "leader") is Liveness.ALIVE
    leader.server.close()
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)


def test_the_leader_reports_the_end_of_a_follower(leader: Agent, follower: Agent) -> None:
    with connect_follower(leader):
        pass
    assert leader.closed.get(timeout=DEADLINE_S) == ("n1", False)


def test_both_sides_report_a_new_connection(leader: Agent, follower: Agent) -> None:
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    assert leader.opened.get(timeout=DEADLINE_S) == ("follower", False)
    assert follower.opened.get(timeout=DEADLINE_S) == ("leader", True)


def test_another_agent_on_the_leaders_port_is_not_followed(leader: Agent, follower: Agent) -> None:
    follower.server.follow("its predecessor", "127.0.0.1", leader.server.port)
    assert follower.closed.get(timeout=DEADLINE_S) == ("its predecessor", True)
    assert follower.opened.empty()


def test_the_liveness_thread_does_not_resolve_names(
    follower: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver may take longer than a lease, and would delay all answers."""
    asked, release = threading.Event(), threading.Event()
    real = socket.getaddrinfo

    def slow(host: Any, *args: Any, **more: Any) -> Any:
        if host == "a-name.invalid" and not more.get("flags", 0) & socket.AI_NUMERICHOST:
            asked.set()
            release.wait(DEADLINE_S)
        return real(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        follower.server.follow("leader", "a-name.invalid", 1)
        assert ask(follower.server.port, "follower", timeout_s=DEADLINE_S / 2) is Liveness.ALIVE
        assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)
        assert not asked.is_set()
    finally:
        release.set()


def test_a_followers_heartbeat_reaches_the_leader(leader: Agent, follower: Agent) -> None:
    beats = [
        NodeHeartbeat(generation=7, step=52, has_joined=True),
        NodeHeartbeat(generation=0, step=None, has_joined=False),
    ]
    follower.server.report(beats[0].encode())  # dropped, as it follows no leader yet
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    assert follower.opened.get(timeout=DEADLINE_S) == ("leader", True)
    for beat in beats:
        follower.server.report(beat.encode())
        assert leader.heard.get(timeout=DEADLINE_S) == ("follower", beat)
    assert leader.heard.empty() and follower.heard.empty()
    assert leader.closed.empty()


def test_the_longest_heartbeat_fits_into_a_frame() -> None:
    longest = NodeHeartbeat(generation=2**63 - 1, step=2**63 - 1).encode()
    assert len(longest) <= LIMITS.frame_bytes
    assert NodeHeartbeat.decode(longest).step == 2**63 - 1


def test_heartbeats_are_limited_to_one_per_interval() -> None:
    clock = ManualClock(100.0)
    beats, sent = Heartbeats("a", clock), list[bytes]()
    for step in (1, 2, 3):
        beats.send_if_due(NodeHeartbeat(generation=2, step=step), sent.append)
    clock.advance(HEARTBEAT_S)
    last = NodeHeartbeat(generation=2, step=9)
    beats.send_if_due(last, sent.append)
    assert [NodeHeartbeat.decode(s).step for s in sent] == [1, 9]
    assert beats.by_node()["a"].heartbeat == last
    beats.record("b", NodeHeartbeat(generation=2, step=8))
    assert beats.by_node()["b"].at_s == clock.monotonic()
    clock.advance(RECENT_LOSS_S + 1)  # nodes that were lost long ago are removed
    beats.send_if_due(last, sent.append)
    assert set(beats.by_node()) == {"a"}


def test_a_heartbeat_is_sent_at_once_when_workers_begin_to_step() -> None:
    beats, sent = Heartbeats("a", ManualClock(100.0)), list[bytes]()
    told = [
        NodeHeartbeat(generation=0, step=None),
        NodeHeartbeat(generation=0, step=None, has_joined=True),
        NodeHeartbeat(generation=2, step=0, has_joined=True),
    ]
    for heartbeat in (told[0], told[0], *told[1:], replace(told[2], step=1)):
        beats.send_if_due(heartbeat, sent.append)
    assert [NodeHeartbeat.decode(s) for s in sent] == told


def test_a_leader_that_refuses_connections_is_reported(follower: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    follower.server.follow("leader", "127.0.0.1", port)
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)


def test_the_end_of_a_former_leader_is_reported(leader: Agent, follower: Agent) -> None:
    """The message about its eviction may arrive before the kernel reports its death."""
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    assert follower.opened.get(timeout=DEADLINE_S) == ("leader", True)
    follower.server.unfollow()
    assert follower.closed.empty()
    leader.server.close()
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)


def test_a_leader_before_the_former_one_is_dropped_and_not_reported(follower: Agent) -> None:
    names = ["first", "second", "third"]
    leaders = [Agent(name) for name in names]
    try:
        for leader, name in zip(leaders, names, strict=True):
            follower.server.follow(name, "127.0.0.1", leader.server.port)
            assert follower.opened.get(timeout=DEADLINE_S) == (name, True)
        assert follower.dropped.get(timeout=DEADLINE_S) == "first"
        assert leaders[0].closed.get(timeout=DEADLINE_S) == ("follower", False)
        leaders[0].server.close()
        leaders[1].server.close()
        assert follower.closed.get(timeout=DEADLINE_S) == ("second", True)
    finally:
        for leader in leaders:
            leader.server.close()
    assert follower.dropped.empty()


def test_a_reelected_leader_keeps_its_connection(leader: Agent, follower: Agent) -> None:
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    assert leader.opened.get(timeout=DEADLINE_S) == ("follower", False)
    follower.server.unfollow()
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    leader.server.announce(WORLD)
    assert follower.worlds.get(timeout=DEADLINE_S) == WORLD
    assert leader.opened.empty() and leader.closed.empty()
    leader.server.close()
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)


def test_a_leader_that_has_not_answered_is_dropped_on_unfollow(follower: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower.server.follow("leader", "127.0.0.1", listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            follower.server.unfollow()
            assert follower.dropped.get(timeout=DEADLINE_S) == "leader"
    follower.server.close()
    assert follower.closed.empty()


@pytest.mark.parametrize("knows", [False, True], ids=["stranger", "knows-the-secret"])
@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xfe\xff\xff\n",
        frame(b"[1, 2]"),
        b"x" * 2048,
        frame(b"[" * 50),
        frame(b'{"generation":7}'),
        frame(b'{"generation":7,"step":-1}'),
        frame(b'{"generation":7,"step":"9"}'),
        b'{"hello": "anyone"}\n',
    ],
)
def test_garbage_closes_only_its_own_connection(leader: Agent, garbage: bytes, knows: bool) -> None:
    with socket.create_connection(("127.0.0.1", leader.server.port)) as connection:
        connection.settimeout(DEADLINE_S)
        if knows:
            prove(connection, KEY, "n1")
        connection.sendall(garbage)
        assert is_hung_up_on(connection)
    assert ask(leader.server.port, "leader") is Liveness.ALIVE
    assert leader.closed.empty() != knows


def test_worlds_are_not_sent_to_peers_without_the_secret(leader: Agent) -> None:
    """Its record contains the address and the key of every member's memory host."""
    leader.server.announce(WORLD)
    with socket.create_connection(("127.0.0.1", leader.server.port)) as connection:
        connection.settimeout(DEADLINE_S)
        with pytest.raises(AuthenticationError):
            prove(connection, SecretKey.generate(), "n1")
    with socket.create_connection(("127.0.0.1", leader.server.port)) as connection:
        connection.settimeout(DEADLINE_S)
        connection.sendall(frame(ClientHandshake(KEY, "n1").hello) + frame(bytes(32)))
        receive_frame(connection)  # the leader's proof, and nothing else
        assert connection.recv(1) == b""
    assert leader.opened.empty()


WORLD = b'{"generation":2,"members":["' + b"x" * 200_000 + b'"]}'


def connect_follower(leader: Agent, name: str = "n1") -> socket.socket:
    """A follower's connection, as the follower's agent holds it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(DEADLINE_S)
    connection.connect(("127.0.0.1", leader.server.port))
    assert prove(connection, KEY, name) == "leader"
    while leader.opened.get(timeout=DEADLINE_S) != (name, False):
        pass  # another follower's
    return connection


def test_followers_receive_the_leaders_worlds(leader: Agent, follower: Agent) -> None:
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    leader.server.announce(WORLD)
    assert json.loads(follower.worlds.get(timeout=DEADLINE_S)) == json.loads(WORLD)
    leader.server.announce(b'{"generation":3}')
    assert json.loads(follower.worlds.get(timeout=DEADLINE_S)) == {"generation": 3}


def test_a_later_follower_receives_the_newest_world(leader: Agent) -> None:
    leader.server.announce(b'{"generation":2}')
    leader.server.announce(b'{"generation":3}')
    with connect_follower(leader) as connection:
        assert json.loads(receive_frame(connection)) == {"generation": 3}


def test_no_world_is_sent_after_the_leaders_term(leader: Agent) -> None:
    leader.server.announce(b'{"generation":2}')
    leader.server.announce_nothing()
    with connect_follower(leader) as connection:
        leader.server.announce(b'{"generation":4}')  # of the next term
        assert json.loads(receive_frame(connection)) == {"generation": 4}


def test_a_probe_receives_no_world(leader: Agent) -> None:
    leader.server.announce(b'{"generation":2}')
    with socket.create_connection(("127.0.0.1", leader.server.port)) as connection:
        connection.settimeout(DEADLINE_S)
        handshake = ClientHandshake(KEY)
        connection.sendall(frame(handshake.hello))
        handshake.answer(receive_frame(connection))
        assert handshake.peer == "leader"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert leader.opened.empty() and leader.closed.empty()


def test_a_follower_without_a_node_name_is_rejected(leader: Agent) -> None:
    leader.server.announce(b'{"generation":2}')
    with socket.create_connection(("127.0.0.1", leader.server.port)) as connection:
        connection.settimeout(DEADLINE_S)
        prove(connection, KEY)
        assert connection.recv(1) == b""
    assert leader.opened.empty() and leader.closed.empty()


def test_worlds_from_nodes_other_than_the_leader_are_ignored(leader: Agent) -> None:
    with connect_follower(leader) as connection:
        connection.sendall(frame(b'{"generation": 9}'))
        assert is_hung_up_on(connection)
    assert leader.closed.get(timeout=DEADLINE_S) == ("n1", False)
    assert leader.worlds.empty()


def test_a_follower_that_never_reads_is_disconnected(leader: Agent, follower: Agent) -> None:
    """After a bounded amount of buffered data."""
    follower.server.follow("leader", "127.0.0.1", leader.server.port)
    leader.server.announce(b"{}")
    follower.worlds.get(timeout=DEADLINE_S)
    with connect_follower(leader, "asleep"):
        for generation in range(100):
            leader.server.announce(b'{"generation":%d,"pad":"%s"}' % (generation, b"x" * 100_000))
            world = json.loads(follower.worlds.get(timeout=DEADLINE_S))
            assert world["generation"] == generation
        assert leader.closed.get(timeout=DEADLINE_S) == ("asleep", False)
    assert leader.closed.empty()


@pytest.mark.parametrize(
    "garbage",
    [b"\xff\xff\xff\xff", frame(b"\x00\xff"), frame(b"[]"), (MAX_WORLD + 1).to_bytes(4, "big")],
)
def test_garbage_from_the_leader_closes_the_connection(follower: Agent, garbage: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower.server.follow("leader", "127.0.0.1", listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(DEADLINE_S)
            serve(connection, KEY, "leader")
            connection.sendall(garbage)
            assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)
    assert follower.worlds.empty()


def test_a_leader_without_the_secret_is_not_followed(follower: Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower.server.follow("leader", "127.0.0.1", listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(DEADLINE_S)
            with pytest.raises(ConnectionResetError):
                serve(connection, SecretKey.generate(), "leader")
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)
    assert follower.opened.empty() and follower.worlds.empty()


@pytest.fixture
def unreachable() -> Iterator[int]:
    """A port on which connecting never completes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # the queue holds one
            yield port


def test_a_follower_answers_while_it_connects_to_a_vanished_leader(
    follower: Agent, unreachable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.agent.liveness.LIVENESS_CONNECT_S", 10 * DEADLINE_S)
    follower.server.follow("leader", "127.0.0.1", unreachable)
    assert ask(follower.server.port, "follower") is Liveness.ALIVE
    assert follower.closed.empty()


def test_an_unreachable_leader_is_reported(
    follower: Agent, unreachable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.agent.liveness.LIVENESS_CONNECT_S", 0.05)
    follower.server.follow("leader", "127.0.0.1", unreachable)
    assert follower.closed.get(timeout=DEADLINE_S) == ("leader", True)
