"""The store that gloo's ranks meet in: what torch needs of it, and what may come from outside."""

from __future__ import annotations

import datetime
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
)

from elastic.worker.faults import Superseded
from elastic.worker.world_store import StoreServer, WorldStore, connect

SOON = datetime.timedelta(milliseconds=20)
Connect = Callable[..., WorldStore]


@pytest.fixture
def port() -> Iterator[int]:
    """Reserved as the agent does it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


@pytest.fixture
def server(port: int) -> Iterator[StoreServer]:
    server = StoreServer(port, nonce="n1", size=2)
    yield server
    server.close()


@pytest.fixture
def client(server: StoreServer, port: int) -> Iterator[Connect]:
    opened: list[WorldStore] = []

    def open_one(nonce: str = "n1", **options: Any) -> WorldStore:
        given = {"timeout_s": 10.0, "give_up": lambda: None, **options}
        opened.append(connect("127.0.0.1", port, nonce=nonce, **given))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def test_what_one_sets_the_other_gets(client: Connect) -> None:
    client().set("a", b"\x00\xff")
    assert client().get("a") == b"\x00\xff"


def test_through_torchs_prefix(client: Connect) -> None:
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


def test_a_wait_ends_when_the_last_key_comes(client: Connect) -> None:
    waiting, other = client(), client()

    def set_both() -> None:
        other.set("a", "1")
        other.set("b", "2")

    thread = threading.Thread(target=set_both)
    thread.start()
    waiting.wait(["a", "b"])
    thread.join()
    assert (waiting.get("a"), waiting.get("b")) == (b"1", b"2")


def test_a_value_that_was_waited_for_is_not_kept_when_it_changes(client: Connect) -> None:
    store = client()
    store.set("a", "1")
    store.wait(["a"])
    store.set("a", "2")
    assert store.get("a") == b"2"


def test_a_wait_in_vain_says_for_what_and_the_store_goes_on(client: Connect) -> None:
    store = client()
    with pytest.raises(DistStoreError, match="never"):
        store.wait(["never"], SOON)
    store.set("never", "1")  # the answer to the wait comes now, and is nobody's
    assert store.get("never") == b"1"


def test_a_wait_is_given_up(client: Connect) -> None:
    over = threading.Event()

    def give_up() -> None:
        if over.is_set():
            raise Superseded("generation 3 is over")

    store = client(give_up=give_up)
    threading.Timer(0.01, over.set).start()
    with pytest.raises(Superseded):
        PrefixStore("n", store).get("never")


def test_a_wait_ends_when_the_server_does(client: Connect, server: StoreServer) -> None:
    store = client()
    threading.Timer(0.01, server.close).start()
    with pytest.raises(DistNetworkError):
        store.get("never")


def test_a_client_of_another_world_is_turned_away(client: Connect) -> None:
    with pytest.raises(DistNetworkError):
        client(nonce="n0")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 1 << 30),
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 4) + b"\xff\xfe\x00\x01",
        struct.pack("!I", 30) + b'{"id":1,"op":"set","key":"a"} ',
    ],
)
def test_garbage_is_hung_up_on_and_harms_nobody(client: Connect, port: int, garbage: bytes) -> None:
    store = client()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(garbage)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_connections_are_limited(client: Connect, port: int) -> None:
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    with pytest.raises((DistNetworkError, OSError)):
        client()
    for connection in idle:
        connection.close()


def test_the_port_is_free_for_the_next_store_at_once(port: int) -> None:
    for _ in range(3):
        server = StoreServer(port, nonce="n1", size=2)
        store = connect("127.0.0.1", port, nonce="n1", timeout_s=10, give_up=lambda: None)
        store.set("a", "1")
        server.close()
        store.close()
    first = StoreServer(port, nonce="n1", size=2)
    with pytest.raises(OSError, match="in use"):
        StoreServer(port, nonce="n2", size=2)
    first.close()
