"""The five listeners of a node, a well-behaved client for each, and their resource usage."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.mark import ParameterSet
from etcd_certificates import Authority
from hostile import Port, from_many_addresses, unix

from checkpoints.memory import LIMITS as MEMORY_LIMITS
from checkpoints.memory import NodeMemory, PeerAddress, PeerServer, PeerStorage
from elastic.agent.health import HealthServer, HealthStatus
from elastic.agent.liveness import LIMITS as LIVENESS_LIMITS
from elastic.agent.liveness import LivenessCallbacks, LivenessServer, probe
from elastic.groups import store as world_store
from elastic.groups.store import StoreServer, connect
from elastic.link.link import LIMITS as LINK_LIMITS
from elastic.link.link import Heartbeat, LinkClient, LinkServer, read_key
from elastic.membership.view import Liveness
from elastic.telemetry.log import get_logger
from elastic.wire.base import PEER_SILENCE_S, Limits
from elastic.wire.handshake import Credentials, SecretKey
from elastic.wire.tls import Tls, TlsFiles

KEY = SecretKey.generate()
DEADLINE_S = 30.0
BETWEEN_NODES = ("liveness", "store", "memory")
WITH_TLS = tuple(f"{kind}+tls" for kind in BETWEEN_NODES)


def parameters(*kinds: str) -> list[ParameterSet]:
    """The listeners for a test. TLS is the same layer below each of them, so that `make test` has
    one of them with it."""
    return [
        pytest.param(kind, marks=[pytest.mark.slow] if kind in WITH_TLS[1:] else [])
        for kind in kinds
    ]


AUTHENTICATED = parameters("link", *BETWEEN_NODES, *WITH_TLS)
ALL = [*AUTHENTICATED, *parameters("health")]


@dataclass(frozen=True)
class Listener:
    """A running server. ``serve`` runs a well-behaved client, and raises an error if it fails."""

    port: Port
    serve: Callable[[], None]
    connect_with: Callable[[SecretKey], None] | None = None  # a real client, with another key
    real_client: Callable[[int], None] | None = None  # connects to another port


@dataclass(frozen=True)
class Cost:
    """Resources that this process holds."""

    threads: tuple[str, ...]
    descriptors: int
    memory_bytes: int

    @classmethod
    def now(cls) -> Cost:
        names = sorted(thread.name for thread in threading.enumerate())
        memory_bytes = int(psutil.Process().memory_info().rss)
        return cls(tuple(names), len(os.listdir("/proc/self/fd")), memory_bytes)


def assert_flat(before: Cost, *, memory_bytes: int = 24 << 20) -> None:
    """Wait until threads and descriptors are back to ``before``; memory may grow only slightly."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        now = Cost.now()
        more = Counter(now.threads) - Counter(before.threads)
        if not more and now.descriptors <= before.descriptors:
            break
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.05)
    assert now.memory_bytes - before.memory_bytes < memory_bytes, (before, now)


def fail(error: BaseException) -> None:
    raise AssertionError("a listener has died") from error


@contextlib.contextmanager
def listening(
    kind: str, folder: Path, limits: Callable[[Limits], Limits] | None = None
) -> Iterator[Listener]:
    """One of :data:`ALL`, optionally with changed limits."""
    change = limits or (lambda given: given)
    if not kind.endswith("+tls"):
        with _MAKERS[kind](folder, change) as listener:
            yield persistent(listener)
        return
    tls = tls_of(Authority(folder, "nodes"))
    with _TLS_MAKERS[kind.removesuffix("+tls")](folder, change, tls) as listener:
        yield persistent(listener)


def persistent(listener: Listener) -> Listener:
    """A listener whose client reconnects, as a node's clients do, after a missed deadline."""

    def serve() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return listener.serve()
            except ConnectionError:
                if time.monotonic() > deadline:
                    raise

    return replace(listener, serve=serve)


def tls_of(authority: Authority, name: str = "node", **issue: Any) -> Tls:
    """The TLS configuration of a node with a certificate issued by this authority."""
    pair = authority.issue(name, **issue)
    return Tls(TlsFiles(authority.cacert, pair.cert, pair.key))


def tight(given: Limits) -> Limits:
    """Short deadlines, for tests that wait until they expire."""
    return replace(given, handshake_s=1.5, message_s=1.5)


def patient(given: Limits) -> Limits:
    """Long deadlines, for tests that assert what a peer receives."""
    return replace(given, handshake_s=DEADLINE_S, message_s=DEADLINE_S)


def patient_with_strangers(given: Limits) -> Limits:
    """For tests that authenticate, and then wait until an incomplete message times out."""
    return replace(given, handshake_s=DEADLINE_S, message_s=0.5)


Change = Callable[[Limits], Limits]


def _tcp(kind: str, port: int, identity: str = "", tls: Tls | None = None) -> Port:
    pick = random.Random(port)

    def plain() -> socket.socket:
        return from_many_addresses(port, pick)

    def secured() -> socket.socket:
        assert tls is not None
        sock = tls.wrap(plain(), server_side=False)
        try:
            sock.do_handshake()
        except BaseException:
            sock.close()
            raise
        return sock

    if tls is None:
        return Port(kind, plain, KEY, identity)
    return Port(kind, secured, KEY, identity, connect_as_stranger=plain)


@contextlib.contextmanager
def _link(folder: Path, change: Change) -> Iterator[Listener]:
    server = LinkServer(
        on_message=lambda worker, message: None,
        on_death=lambda worker, death: None,
        on_error=fail,
        limits=change(LINK_LIMITS),
    )
    server.start()

    def serve() -> None:
        LinkClient.connect(
            server.path,
            local_rank=0,
            on_message=lambda message: None,
            on_agent_death=lambda: None,
            heartbeat=lambda: Heartbeat(generation=0, step=0, phase="other", step_time_s=0.0),
        ).close()

    try:
        yield Listener(Port("link", lambda: unix(server.path), read_key(server.path)), serve)
    finally:
        server.close()


@contextlib.contextmanager
def _liveness(folder: Path, change: Change, tls: Tls | None = None) -> Iterator[Listener]:
    lost: list[str] = []
    opened = threading.Event()
    callbacks = LivenessCallbacks(
        on_opened=lambda node_id, is_leader: None,
        on_closed=lambda node_id, is_leader: lost.append(node_id),
        on_silent=lambda node_id, is_leader: lost.append(node_id),
        on_dropped=lambda node_id: None,
        on_world=lambda record: None,
        on_heartbeat=lambda node_id, heartbeat: None,
        on_error=fail,
    )
    leader = LivenessServer(
        "127.0.0.1",
        callbacks,
        credentials=Credentials(key=lambda: KEY, identity="leader", tls=tls),
        limits=change(LIVENESS_LIMITS),
    )
    follower = LivenessServer(
        "127.0.0.1",
        replace(callbacks, on_opened=lambda node_id, is_leader: opened.set()),
        credentials=Credentials(key=lambda: KEY, identity="follower", tls=tls),
    )
    leader.start()
    follower.start()
    follower.follow("leader", "127.0.0.1", leader.port)
    assert opened.wait(DEADLINE_S)

    def ask(port: int, key: SecretKey) -> None:
        verdict = probe("127.0.0.1", port, "leader", key=key, timeout_s=DEADLINE_S, tls=tls)
        if verdict.liveness is not Liveness.ALIVE:
            raise ConnectionError(verdict.reason)

    def serve() -> None:
        ask(leader.port, KEY)
        assert "follower" not in lost and "leader" not in lost

    try:
        yield Listener(
            _tcp("liveness", leader.port, "n1", tls),
            serve,
            connect_with=lambda key: ask(leader.port, key),
            real_client=lambda port: ask(port, KEY),
        )
    finally:
        follower.close()
        leader.close()


@contextlib.contextmanager
def _store(folder: Path, change: Change, tls: Tls | None = None) -> Iterator[Listener]:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    original = world_store.limits_of

    def changed(size: int, silence_s: float = PEER_SILENCE_S) -> Limits:
        return change(original(size, silence_s))

    world_store.limits_of = changed
    try:
        server = StoreServer(port, nonce="aa", size=4, key=KEY, tls=tls)
    finally:
        world_store.limits_of = original

    def client(at: int, key: SecretKey) -> None:
        store = connect(
            *("127.0.0.1", at), nonce="aa", key=key, timeout_s=DEADLINE_S, give_up=_never, tls=tls
        )
        store.set("good", b"1")
        assert store.get("good") == b"1"
        store.close()

    held = connect(
        *("127.0.0.1", port), nonce="aa", key=KEY, timeout_s=DEADLINE_S, give_up=_never, tls=tls
    )

    def serve() -> None:
        client(port, KEY)
        assert held.check(["good"])

    try:
        yield Listener(
            _tcp("store", port, "aa", tls),
            serve,
            connect_with=lambda key: client(port, key),
            real_client=lambda at: client(at, KEY),
        )
    finally:
        held.close()
        server.close()


@contextlib.contextmanager
def _memory(folder: Path, change: Change, tls: Tls | None = None) -> Iterator[Listener]:
    own, copies = NodeMemory(folder / "own"), NodeMemory(folder / "copies")
    for memory in (own, copies):
        memory.make_folder("")
    server = PeerServer(
        own,
        copies,
        credentials=Credentials(key=lambda: KEY, identity="node", tls=tls),
        host="127.0.0.1",
        limits=change(MEMORY_LIMITS),
        report=lambda line: get_logger().warning(line),
        on_error=fail,
    )

    def client(at: int, key: SecretKey) -> None:
        storage = PeerStorage(
            PeerAddress("n", "127.0.0.1", at, "node"),
            key=lambda: key,
            tls=tls,
            timeout_s=DEADLINE_S,
        )
        try:
            storage.list("")
        finally:
            storage.close()

    def serve() -> None:
        client(server.port, KEY)
        # The thread of a served peer is joined when the next peer connects.
        client(server.port, KEY)

    try:
        yield Listener(
            _tcp("memory", server.port, "", tls),
            serve,
            connect_with=lambda key: client(server.port, key),
            real_client=lambda at: client(at, KEY),
        )
    finally:
        server.close()


@contextlib.contextmanager
def _health(folder: Path, change: Change) -> Iterator[Listener]:
    server = HealthServer(0, {"/livez": lambda: HealthStatus(True, "it lives")}, on_error=fail)
    server.start()

    def serve() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        try:
            connection.request("GET", "/livez")
            assert connection.getresponse().status == 200
        finally:
            connection.close()

    try:
        yield Listener(replace(_tcp("health", server.port), key=None), serve)
    finally:
        server.close()


def _never() -> None:
    """Never give up."""


_TLS_MAKERS = {"liveness": _liveness, "store": _store, "memory": _memory}
_MAKERS = {
    "link": _link,
    "liveness": _liveness,
    "store": _store,
    "memory": _memory,
    "health": _health,
}
