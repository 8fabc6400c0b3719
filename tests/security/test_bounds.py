"""Slow, silent or numerous clients: each is bounded, and well-behaved ones are served."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from listeners import (
    ALL,
    AUTHENTICATED,
    Cost,
    assert_flat,
    listening,
    parameters,
    patient_with_strangers,
    tight,
)
from raw_peer import is_hung_up_on, prove

from elastic.testing.waiting import eventually
from elastic.wire.base import Limits
from elastic.wire.handshake import ClientHandshake, SecretKey, frame

FLOOD = 600


@pytest.mark.parametrize("kind", ALL)
def test_idle_connections_are_closed_and_do_not_block_clients(kind: str, tmp_path: Path) -> None:
    """Above the limit, the oldest unauthenticated connections are closed first."""
    with listening(kind, tmp_path, tight) as listener:
        listener.serve()
        before = Cost.now()
        with contextlib.ExitStack() as idle:
            sockets = []
            for number in range(FLOOD):
                sockets.append(idle.enter_context(listener.port.stranger()))
                if number % 100 == 0:
                    listener.serve()
            listener.serve()
            # Half of the descriptors are the client ends in this test.
            held = Cost.now().descriptors - before.descriptors - FLOOD
            assert held <= 300, "a listener holds more than its budget"
            for sock in sockets:  # closed at a deadline, without another client connecting
                sock.settimeout(30)
                assert is_hung_up_on(sock)
        listener.serve()
        assert_flat(before)


@pytest.mark.parametrize("kind", ALL)
def test_a_client_that_trickles_bytes_is_disconnected(kind: str, tmp_path: Path) -> None:
    with listening(kind, tmp_path, tight) as listener:
        listener.serve()
        before = Cost.now()
        payload = b"GET /livez HTTP/1.1\r\n" if kind == "health" else frame(_hello())
        with listener.port.connect() as slow:
            slow.settimeout(0.05)
            with contextlib.suppress(ConnectionError):
                for byte in payload * 100:
                    slow.sendall(bytes([byte]))
                    with contextlib.suppress(TimeoutError):
                        if not slow.recv(1):
                            break
                else:
                    raise AssertionError("the connection stays open")
        listener.serve()
        assert_flat(before)


@pytest.mark.parametrize(
    "kind", parameters("link", "liveness", "store", "liveness+tls", "store+tls")
)
def test_an_incomplete_message_times_out(kind: str, tmp_path: Path) -> None:
    """Even from an authenticated peer. (The memory server has a deadline for each exchange.)"""
    with listening(kind, tmp_path, patient_with_strangers) as listener:
        listener.serve()
        before = Cost.now()
        assert listener.port.key is not None
        with listener.port.connect() as slow:
            slow.settimeout(30)
            prove(slow, listener.port.key, listener.port.identity)
            slow.sendall(frame(b"{" + b" " * 60)[:30])
            assert is_hung_up_on(slow)
        listener.serve()
        assert_flat(before)


@pytest.mark.parametrize("kind", AUTHENTICATED)
def test_authenticated_connections_are_limited(kind: str, tmp_path: Path) -> None:
    def few(given: Limits) -> Limits:
        return replace(given, open_connections=3)

    with listening(kind, tmp_path, few) as listener, contextlib.ExitStack() as held:
        assert listener.port.key is not None
        for _ in range(2):
            sock = held.enter_context(listener.port.connect())
            prove(sock, listener.port.key, listener.port.identity)
        before = Cost.now()
        before = replace(before, threads=before.threads + ("checkpoint-peer-connection",) * 3)
        for _ in range(20):
            with listener.port.connect() as one_more:
                one_more.settimeout(30)
                with contextlib.suppress(ConnectionError):
                    prove(one_more, listener.port.key, listener.port.identity)
                    socket.socket.shutdown(one_more, socket.SHUT_WR)
                    is_hung_up_on(one_more)
        assert_flat(before)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Limits the process to a few more descriptors than it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = Cost.now().descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("kind", ALL)
def test_a_listener_out_of_descriptors_waits_until_some_are_free(
    kind: str, tmp_path: Path, few_descriptors: None
) -> None:
    with listening(kind, tmp_path, tight) as listener:
        listener.serve()
        before = Cost.now()
        with contextlib.ExitStack() as idle, contextlib.suppress(OSError):
            for _ in range(FLOOD):
                idle.enter_context(listener.port.stranger())
        eventually(lambda: Cost.now().descriptors <= before.descriptors, "descriptors are released")
        listener.serve()


def _hello() -> bytes:
    return ClientHandshake(SecretKey.generate(), "n1").hello
