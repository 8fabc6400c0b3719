"""A worker's side of the handshake with its agent: one attempt, which ends at once if the agent
dies."""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass

from elastic.clock import Clock
from elastic.errors import LinkError
from elastic.link.peer import peer_of
from elastic.link.protocol import (
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    ClientHandshakeReply,
    ClientHandshakeRequest,
    Message,
    decode,
    encode,
)
from elastic.secure_channel import private_files
from elastic.secure_channel.errors import AuthenticationError, ProtocolError
from elastic.secure_channel.frames import FrameReader, frame
from elastic.secure_channel.handshake import MAX_FRAME, ClientHandshake
from elastic.secure_channel.keys import SecretKey

KEY_FILE = "key"  # mode 0600, in the socket's folder of mode 0700


@dataclass(frozen=True, kw_only=True)
class AgentConnection:
    """A connection after the handshake. The caller owns both descriptors."""

    sock: socket.socket  # non-blocking
    agent: int  # pidfd; -1: the agent is in a pid namespace that is not visible to this process
    received: FrameReader
    messages: list[Message]  # received right after the agent's reply


def handshake(
    path: str,
    request: ClientHandshakeRequest,
    *,
    key: SecretKey,
    deadline_s: float,
    stop: int,
    clock: Clock,
) -> AgentConnection:
    """Connect, prove to each other that both have the link's key, and wait for the agent's reply;
    stop once ``stop`` is readable.

    Raises OSError if another attempt may succeed, LinkError if it cannot.
    """
    handshake = ClientHandshake(key, str(request.pid))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    agent = -1
    try:
        sock.connect(path)
        pid = peer_of(sock).pid
        agent = os.pidfd_open(pid) if pid else -1
        sock.send(frame(handshake.hello))
        received = FrameReader(MAX_FRAME)
        try:
            while (challenge := received.next()) is None:
                _wait(sock, agent, stop, deadline_s - clock.monotonic())
                received.feed(_receive(sock, path))
            sock.send(frame(handshake.answer(challenge)) + frame(encode(request)))
            received.limit = MAX_MESSAGE
            while (reply := received.next()) is None:
                _wait(sock, agent, stop, deadline_s - clock.monotonic())
                received.feed(_receive(sock, path))
            _check(decode(reply))
            messages = []
            while (message := received.next()) is not None:
                messages.append(decode(message))
        except ProtocolError as error:
            is_other_agent = isinstance(error, AuthenticationError)
            raise LinkError(
                f"the listener at {path} is not this worker's agent: {error}",
                hint="the agent sets ELASTIC_LINK; it may be another or an earlier agent's"
                if is_other_agent
                else "use the same torch-elastic-harness in the worker's and the agent's Python",
            ) from error
        return AgentConnection(sock=sock, agent=agent, received=received, messages=messages)
    except BaseException:
        sock.close()
        if agent >= 0:
            os.close(agent)
        raise


def key_path(path: str) -> str:
    """The path of the file that holds the key of the link at ``path``."""
    return os.path.join(os.path.dirname(path), KEY_FILE)


def read_key(path: str) -> SecretKey:
    """The key of the link at ``path``, as its agent wrote it, readable only by this user.

    Raises OSError if there is none, LinkError if others could have written or read it.
    """
    try:
        return SecretKey.parse(private_files.read(key_path(path)).decode("ascii"))
    except (PermissionError, ValueError) as error:
        raise LinkError(
            f"the key of the link at {path} cannot be used: {error}",
            hint="ELASTIC_LINK is set by the agent; workers must run as its user",
        ) from None


def _wait(sock: socket.socket, agent: int, stop: int, timeout_s: float) -> None:
    poll = select.poll()
    for fd in (sock.fileno(), agent, stop):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]
    if not ready:
        raise TimeoutError("no answer to the handshake")
    if sock.fileno() not in ready:
        raise ConnectionError("the agent died" if agent in ready else "interrupted")


def _receive(sock: socket.socket, path: str) -> bytes:
    chunk = sock.recv(1 << 16)
    if not chunk:
        raise LinkError(f"the agent at {path} refused this worker", hint="its log has the reason")
    return chunk


def _check(message: Message) -> None:
    if not isinstance(message, ClientHandshakeReply) or message.version != PROTOCOL_VERSION:
        raise LinkError(
            f"the agent replied with {message}, not with a handshake of version {PROTOCOL_VERSION}",
            hint="use the same torch-elastic-harness in the worker's and the agent's Python",
        )
