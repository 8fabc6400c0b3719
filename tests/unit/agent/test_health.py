"""/livez and /readyz: their answers, and that no client can block another."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from kit.manual_clock import ManualClock
from kit.membership_nodes import node, world

from elastic.agent.health import (
    HEALTH_CONNECTION_S,
    MAX_CONNECTIONS,
    MAX_REQUEST,
    HealthServer,
    HealthStatus,
    liveness,
    readiness,
)
from elastic.agent.node import Watchdog
from elastic.errors import ConfigError
from elastic.membership.records import Done, Node, NodeState, Outcome, WorldRecord
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import WorldState

SEVEN = world("n1", "n2", "n3", mode="in-process")
WITHOUT_N1 = world("n2", "n3", generation=8, mode="in-process")
EIGHT = world("n1", "n2", generation=8, mode="in-process")
PAUSED = replace(EIGHT, state=WorldState.PAUSED, reason="2 more nodes are needed")
PLANNED = replace(EIGHT, switch_at_step=12)
IN_SEVEN = node("n1", NodeState.READY, in_process=True, running=SEVEN)


def ended(outcome: Outcome, exit_code: int) -> Done:
    return Done(
        outcome=outcome,
        reason="all workers ended well" if exit_code == 0 else "the budget is spent",
        exit_code=exit_code,
        generation=7,
        final_step=100,
        time_s=0.0,
    )


@pytest.mark.parametrize(
    ("n", "newest", "said"),
    [
        (IN_SEVEN, SEVEN, "in generation 7"),
        (IN_SEVEN, PLANNED, "in generation 7"),  # the workers switch without a restart
        (replace(IN_SEVEN, running=PAUSED), PAUSED, "2 more nodes are needed"),
        (node("n1", NodeState.STARTING, running=SEVEN), SEVEN, "in generation 7"),  # restart mode
        (IN_SEVEN, None, "in generation 7"),  # etcd was wiped: the running world remains valid
    ],
)
def test_a_node_whose_workers_are_in_the_world_is_ready(
    n: Node, newest: WorldRecord | None, said: str
) -> None:
    verdict = readiness(n, newest, None, is_parked=False)
    assert verdict.is_ok
    assert said in verdict.reason


@pytest.mark.parametrize(
    ("n", "newest", "said"),
    [
        (node("n1"), None, "waiting for a world"),
        (node("n1", failure="boom"), SEVEN, "failed before: boom"),
        (node("n1", NodeState.STARTING), SEVEN, "warming up"),
        (
            node("n1", NodeState.READY, in_process=True),
            SEVEN,
            "wait for a world that includes them",
        ),
        (IN_SEVEN, EIGHT, "change to generation 8"),
        (IN_SEVEN, WITHOUT_N1, "continues without this node"),
        (replace(IN_SEVEN, state=NodeState.LEAVING), SEVEN, "asked to leave"),
        (replace(IN_SEVEN, state=NodeState.FINISHED), SEVEN, "have succeeded"),
    ],
)
def test_a_node_whose_workers_are_not_in_the_world_is_not_ready(
    n: Node, newest: WorldRecord | None, said: str
) -> None:
    verdict = readiness(n, newest, None, is_parked=False)
    assert not verdict.is_ok
    assert said in verdict.reason


@pytest.mark.parametrize(("outcome", "code"), [(Outcome.SUCCESS, 0), (Outcome.FAILURE, 70)])
def test_a_parked_node_is_not_ready_and_reports_the_result(outcome: Outcome, code: int) -> None:
    verdict = readiness(IN_SEVEN, SEVEN, ended(outcome, code), is_parked=True)
    body = json.loads(verdict.body())
    assert (body["ok"], body["parked"]) == (False, True)
    assert body["job"]["outcome"] == outcome.value
    assert body["job"]["exit_code"] == code


def test_a_thread_without_heartbeats_is_named() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    thread = threading.Thread(target=watchdog.heartbeat, name="elastic-node")
    thread.start()
    thread.join()
    clock.advance(80)
    watchdog.heartbeat()
    assert liveness(watchdog.silences_s()).is_ok
    clock.advance(20)
    verdict = liveness(watchdog.silences_s())
    assert not verdict.is_ok
    assert verdict.reason.startswith("elastic-node has made no progress for 100")


def test_a_thread_that_ended_normally_is_not_reported() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    watchdog.heartbeat()
    watchdog.rest()
    clock.advance(1000)
    assert liveness(watchdog.silences_s()).is_ok


# Over sockets ---------------------------------------------------------------------------------

ROUTES = {
    "/livez": lambda: HealthStatus(True, "it lives"),
    "/readyz": lambda: HealthStatus(False, "it waits", {"node": "n1"}),
}


def fail(error: BaseException) -> None:
    raise AssertionError from error


@pytest.fixture
def server() -> Iterator[HealthServer]:
    made = HealthServer(0, ROUTES, on_error=fail)
    made.start()
    yield made
    made.close()
    assert "elastic-health" not in {t.name for t in threading.enumerate()}


def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_answers_carry_the_verdict_and_its_reason(server: HealthServer) -> None:
    status, body = ask(server.port, "/livez")
    assert (status, json.loads(body)) == (200, {"ok": True, "reason": "it lives"})
    status, body = ask(server.port, "/readyz?verbose")
    assert (status, json.loads(body)) == (503, {"ok": False, "reason": "it waits", "node": "n1"})
    assert ask(server.port, "/readyz", "HEAD") == (503, b"")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("POST", "/livez", 501)])
def test_an_unsupported_path_or_method_is_rejected(
    server: HealthServer, method: str, path: str, status: int
) -> None:
    assert ask(server.port, path, method)[0] == status


@pytest.mark.parametrize(
    "sent", [b"", b"GET /livez HTTP/1.1\r\n", b"\xff\x00\r\n\r\n", b"x" * (2 * MAX_REQUEST)]
)
def test_malformed_requests_do_not_affect_other_clients(server: HealthServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(sent)
        assert ask(server.port, "/livez")[0] == 200


def test_idle_clients_beyond_the_limit_do_not_block_other_clients(server: HealthServer) -> None:
    with ExitStack() as idle:
        for _ in range(2 * MAX_CONNECTIONS):
            idle.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
            )
            assert ask(server.port, "/livez")[0] == 200


def test_an_idle_client_is_disconnected() -> None:
    clock = ManualClock()
    server = HealthServer(0, ROUTES, on_error=fail, clock=clock)
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
            client.sendall(b"GET /livez")
            assert ask(server.port, "/livez")[0] == 200  # by now the connection is accepted
            clock.advance(HEALTH_CONNECTION_S + 1)
            assert client.recv(1) == b""  # times out if it is kept
    finally:
        server.close()


def test_a_port_in_use_is_reported_with_its_number(server: HealthServer) -> None:
    with pytest.raises(ConfigError) as refused:
        HealthServer(server.port, ROUTES, on_error=fail)
    assert f"health_port={server.port}" in refused.value.message
    assert "ELASTIC_HEALTH_PORT" in refused.value.hint


def test_a_server_that_never_served_releases_its_port() -> None:
    unused = HealthServer(0, ROUTES, on_error=fail)
    port = unused.port
    unused.close()
    with socket.create_server(("127.0.0.1", port)) as next_one:
        assert next_one.getsockname()[1] == port
