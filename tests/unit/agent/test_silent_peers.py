"""Peers that no longer acknowledge data: socket timeouts, and the nodes that are named."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kit.membership_nodes import node, world

from elastic.agent.workers import nodes_at
from elastic.errors import ConfigError, GroupBuildFailed
from elastic.groups.faults import unreachable_peers
from elastic.groups.group import Footprint
from elastic.membership.records import Member
from elastic.tuning.intervals import LEASE_S, PEER_SILENCE, peer_silence_of, peer_silence_s
from elastic.wire.base import give_up_on_silence
from elastic.wire.channel import Channel
from elastic.wire.hub import Connection

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


def limit_ms(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_socket_gets_keepalive_probes_and_a_user_timeout(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sock, _ = pair
    give_up_on_silence(sock, 6.0)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert limit_ms(sock) == 6000
    every_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    assert every_s == sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 2
    assert every_s * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) <= 6
    give_up_on_silence(sock, 0.5)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1, "whole seconds"


def test_a_unix_socket_is_accepted_without_timeouts() -> None:
    one, other = socket.socketpair()
    with one, other:
        give_up_on_silence(one, 6.0)


def test_a_blocking_channel_has_a_user_timeout(pair: tuple[socket.socket, socket.socket]) -> None:
    Channel(pair[0], timeout_s=1.0, silence_s=4.5)
    assert limit_ms(pair[0]) == 4500


def test_the_sockets_of_a_group_get_a_user_timeout() -> None:
    """Those identified by the store's port; gloo's: tests/kill/test_network_faults.py."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        footprint = Footprint(listener.getsockname()[1])
        with socket.create_connection(listener.getsockname()) as ours:
            foreign = socket.socket()
            footprint.give_up_on_silence(3.0)
            assert limit_ms(ours) == 3000
            assert limit_ms(foreign) == 0
            foreign.close()


@pytest.mark.parametrize(
    ("number", "is_silent"),
    [(errno.ETIMEDOUT, True), (errno.EHOSTUNREACH, True), (errno.ECONNRESET, False)],
)
def test_a_connection_distinguishes_silence_from_a_close(number: int, is_silent: bool) -> None:
    class Failing:
        def recv(self, count: int) -> bytes:
            raise OSError(number, "")

    connection = Connection(Failing(), "there", is_outgoing=True, limit=1)  # type: ignore[arg-type]
    assert connection.receive() == b""
    assert connection.fell_silent is is_silent


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{PAIR}Read error [10.0.0.2]:1769: Connection timed out. This is", ("10.0.0.2",)),
        (f"{PAIR}Read error [fd00::2]:1769: No route to host. This is", ("fd00::2",)),
        (
            "Gloo connectFullMesh failed with […] timed out connecting: SO_ERROR: Connection timed "
            "out, remote=[10.0.0.3]:9138$1",
            ("10.0.0.3",),
        ),
        (f"{PAIR}Connection closed by peer [10.0.0.2]:1769. This is", ()),
        (f"{PAIR}Read error [10.0.0.2]:1769: Connection reset by peer.", ()),
        ("Connection timed out", ()),
    ],
)
def test_gloo_errors_name_the_unreachable_peers(text: str, found: tuple[str, ...]) -> None:
    assert unreachable_peers(RuntimeError(text)) == found
    failed = GroupBuildFailed("the group could not be built")
    failed.__cause__ = RuntimeError(text)
    assert unreachable_peers(failed) == found, "also as the cause of a failed build"


def test_only_unique_addresses_identify_nodes() -> None:
    def member(name: str, address: str) -> Member:
        return replace(node(name).as_member(), liveness_host=address)

    pair = (member("n2", "10.0.0.7"), member("n3", "10.0.0.7"))
    three = replace(world("n1", "n2", "n3"), members=(member("n1", "10.0.0.1"), *pair))
    assert nodes_at(three, 7, ("10.0.0.1", "10.9.9.9")) == ("id-n1",)
    assert nodes_at(three, 6, ("10.0.0.1",)) == (), "of another generation"
    assert nodes_at(three, 7, ("10.0.0.7",)) == (), "two nodes share it"
    assert nodes_at(None, 7, ("10.0.0.1",)) == ()


def test_the_silence_limit_follows_the_lease() -> None:
    assert peer_silence_s(LEASE_S) > LEASE_S
    assert peer_silence_of({}) == peer_silence_s(LEASE_S)
    assert peer_silence_of({PEER_SILENCE: "4.5"}) == 4.5
    for wrong in ("", "soon", "0", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match=PEER_SILENCE):
            peer_silence_of({PEER_SILENCE: wrong})
