"""The rendezvous store of gloo's ranks: what torch requires of it, and hostile input."""

from __future__ import annotations

import datetime
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from raw_peer import is_hung_up_on, prove
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
)

from elastic.errors import Superseded
from elastic.groups.store import StoreServer, WorldStore, connect
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.handshake import SecretKey, frame

SOON = datetime.timedelta(milliseconds=20)
Connect = Callable[..., WorldStore]
KEY = SecretKey.generate()


@pytest.fixture
def port() -> Iterator[int]:
    """Reserved in the same way as by the agent."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


@pytest.fixture
def server(port: int) -> Iterator[StoreServer]:
    server = StoreServer(port, nonce="n1", size=2, key=KEY)
    yield server
    server.close()


@pytest.fixture
def client(server: StoreServer, port: int) -> Iterator[Connect]:
    opened: list[WorldStore] = []

    def open_one(nonce: str = "n1", **options: Any) -> WorldStore:
        given = {"key": KEY, "timeout_s": 10.0, "give_up": lambda: None, **options}
        opened.append(connect("127.0.0.1", port, nonce=nonce, **given))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def test_a_value_set_by_one_client_is_read_by_another(client: Connect) -> None:
    client().set("a", b"\x00\xff")
    assert client().get("a") == b"\x00\xff"


def test_the_store_works_through_torchs_prefix_store(client: Connect) -> None:
    store = client()
    prefixed = PrefixStore("nonce", store)
    prefixed.set("a", "1")
    prefixed.wait(["a"], SOON)
    assert prefixed.get("a") == b"1"
    assert store.check(["nonce/a"])
    assert prefixed.add("n", 2) == 2
    assert prefixed.add("n", 3) == 5
    assert prefixed.compare_set("c", "", "x") == b"x"
    assert prefixed.compare_set("c", "y", "z") == b"x"
    assert prefixed.delete_key("c")
    assert not prefixed.check(["c"])
    assert prefixed.num_keys() == store.num_keys() == 2


def test_a_wait_ends_when_the_last_key_is_set(client: Connect) -> None:
    waiting, other = client(), client()

    def set_both() -> None:
        other.set("a", "1")
        other.set("b", "2")

    thread = threading.Thread(target=set_both)
    thread.start()
    waiting.wait(["a", "b"])
    thread.join()
    assert (waiting.get("a"), waiting.get("b")) == (b"1", b"2")


def test_a_value_is_not_cached_after_a_wait(client: Connect) -> None:
    store = client()
    store.set("a", "1")
    store.wait(["a"])
    store.set("a", "2")
    assert store.get("a") == b"2"


def test_a_wait_that_times_out_names_its_key_and_leaves_the_store_usable(client: Connect) -> None:
    store = client()
    with pytest.raises(DistStoreError, match="never"):
        store.wait(["never"], SOON)
    store.set("never", "1")  # the late answer to the wait is discarded
    assert store.get("never") == b"1"


def test_a_wait_can_be_cancelled(client: Connect) -> None:
    over = threading.Event()

    def give_up() -> None:
        if over.is_set():
            raise Superseded("generation 3 is over")

    store = client(give_up=give_up)
    threading.Timer(0.01, over.set).start()
    with pytest.raises(Superseded):
        PrefixStore("n", store).get("never")


def test_a_wait_ends_when_the_server_closes(client: Connect, server: StoreServer) -> None:
    store = client()
    threading.Timer(0.01, server.close).start()
    with pytest.raises(DistNetworkError):
        store.get("never")


def test_a_client_of_another_world_is_rejected(client: Connect) -> None:
    with pytest.raises(DistNetworkError):
        client(nonce="n0")


HOSTILE = [
    b'{"id": Infinity, "op": "count"}',
    b'{"id": 1e400, "op": "count"}',
    b'{"id": 1, "op": "add", "key": "a", "by": NaN}',
    b'{"id": %s, "op": "count"}' % (b"9" * 5000),
    b"[" * 5000,
    b'{"id": 1, "op": "check", "keys": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"[]",
    b"\xff\xfe\x00\x01",
    b'{"id":1,"op":"set","key":"a"} ',
    b'{"id":1,"op":["set"],"key":"a","value":""}',
    b'{"id":1,"op":"set","key":["a"],"value":""}',
    b'{"id":1,"op":"set","key":"a","value":"?"}',
    b'{"id":1,"op":"set","key":"a","value":"YQ==","more":1}',
    b'{"id":1,"op":"wait","keys":[{}]}',
    b'{"id":1,"id":2,"op":"count"}',
]


@pytest.mark.parametrize("sent", HOSTILE, ids=lambda sent: sent[:40].decode(errors="replace"))
def test_an_invalid_request_closes_only_its_connection(
    client: Connect, port: int, sent: bytes
) -> None:
    """From a client that knows the run's key: a bug, or a compromised worker."""
    store = client()
    with socket.create_connection(("127.0.0.1", port)) as bad:
        bad.settimeout(PATIENCE_S)
        prove(bad, KEY, "n1")
        bad.sendall(frame(sent))
        assert is_hung_up_on(bad)
    store.set("a", "1")
    assert store.get("a") == b"1"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 1 << 30),
        *(frame(sent) for sent in HOSTILE),
    ],
)
def test_garbage_closes_only_its_connection(client: Connect, port: int, garbage: bytes) -> None:
    store = client()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(PATIENCE_S)
        stranger.sendall(garbage)
        assert is_hung_up_on(stranger)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_a_client_without_the_run_key_is_rejected(client: Connect) -> None:
    with pytest.raises(DistNetworkError, match="has not proved"):
        client(key=SecretKey.generate())


def test_unauthenticated_connections_do_not_block_a_rank(client: Connect, port: int) -> None:
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    rank = client()
    rank.set("a", "1")
    assert rank.get("a") == b"1"
    for connection in idle:
        connection.close()


def test_connections_are_limited(client: Connect) -> None:
    for _ in range(8):
        client().check(["a"])
    with pytest.raises(DistNetworkError):
        client().set("a", "1")


def test_the_next_store_can_reuse_the_port_immediately(port: int) -> None:
    for _ in range(3):
        server = StoreServer(port, nonce="n1", size=2, key=KEY)
        store = connect(
            "127.0.0.1", port, nonce="n1", key=KEY, timeout_s=PATIENCE_S, give_up=lambda: None
        )
        store.set("a", "1")
        server.close()
        store.close()
    first = StoreServer(port, nonce="n1", size=2, key=KEY)
    with pytest.raises(OSError, match="in use"):
        StoreServer(port, nonce="n2", size=2, key=KEY)
    first.close()
