"""A worker's hello and the agent's welcome: one attempt, which waits for nobody who is dead."""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass

from elastic.clock import Clock
from elastic.errors import LinkError
from elastic.link.peer import peer_of
from elastic.link.protocol import (
    PROTOCOL_VERSION,
    Hello,
    LineBuffer,
    Message,
    Welcome,
    decode,
    encode,
)


@dataclass(frozen=True, kw_only=True)
class Welcomed:
    """A connection whose worker is known to the agent. The receiver owns both descriptors."""

    sock: socket.socket  # does not block
    agent: int  # pidfd; -1: the agent is in a pid namespace that cannot be seen from here
    received: LineBuffer
    messages: list[Message]  # came right behind the welcome


def say_hello(path: str, hello: Hello, *, deadline_s: float, stop: int, clock: Clock) -> Welcomed:
    """Connect and wait for the welcome, until ``stop`` can be read.

    Raises OSError where another attempt may help, LinkError where it will not.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    agent = -1
    try:
        sock.connect(path)
        pid = peer_of(sock).pid
        agent = os.pidfd_open(pid) if pid else -1
        sock.send(encode(hello))
        received = LineBuffer()
        messages: list[Message] = []
        while not messages:
            _wait(sock, agent, stop, deadline_s - clock.monotonic())
            messages += _heard(sock, received, path)
        _check(messages.pop(0))
        return Welcomed(sock=sock, agent=agent, received=received, messages=messages)
    except BaseException:
        sock.close()
        if agent >= 0:
            os.close(agent)
        raise


def _wait(sock: socket.socket, agent: int, stop: int, timeout_s: float) -> None:
    poll = select.poll()
    for fd in (sock.fileno(), agent, stop):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]
    if not ready:
        raise TimeoutError("no welcome came")
    if sock.fileno() not in ready:
        raise ConnectionError("the agent died" if agent in ready else "interrupted")


def _heard(sock: socket.socket, received: LineBuffer, path: str) -> list[Message]:
    chunk = sock.recv(1 << 16)
    if not chunk:
        raise LinkError(f"the agent at {path} refused this worker", hint="its log says why")
    return [decode(line) for line in received.feed(chunk)]


def _check(message: Message) -> None:
    if not isinstance(message, Welcome) or message.version != PROTOCOL_VERSION:
        raise LinkError(
            f"the agent answered with {message}, not a welcome of version {PROTOCOL_VERSION}",
            hint="use the same torch-elastic-harness in the worker's and the agent's Python",
        )
