"""Which sockets belong to a group that is being built, so that an abort shuts those down."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from elastic.groups.group import Footprint
from elastic.testing.waiting import PATIENCE_S


class Loop:
    """What a gloo device holds: an epoll descriptor, a listener, and a connection to a peer."""

    def __init__(self, stack: ExitStack) -> None:
        self.poller = stack.enter_context(closing(select.epoll()))
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.peer = stack.enter_context(socket.create_connection(self.listener.getsockname()))
        self.connection = stack.enter_context(self.listener.accept()[0])
        self.poller.register(self.listener, select.EPOLLIN)
        self.poller.register(self.connection, select.EPOLLIN)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_a_group_whose_loop_gets_the_number_of_the_last_ones_is_shut_down(
    stack: ExitStack,
) -> None:
    """A traceback or a work may keep the last group open until the next one is being built."""
    with ExitStack() as last_group:
        last = Loop(last_group)
        footprint, number = Footprint(None), last.poller.fileno()
    group = Loop(stack)
    assert group.poller.fileno() == number, "the kernel takes the lowest free number"
    footprint.seal()
    assert group.connection.fileno() in footprint.sockets()
    footprint.shut_down()
    group.connection.settimeout(PATIENCE_S)
    assert group.connection.recv(1) == b""


def test_a_group_that_was_leaked_before_is_left_alone(stack: ExitStack) -> None:
    leaked = Loop(stack)
    footprint = Footprint(None)
    group = Loop(stack)
    footprint.seal()
    assert set(footprint.sockets()) == {group.listener.fileno(), group.connection.fileno()}
    assert leaked.connection.fileno() not in footprint.sockets()
