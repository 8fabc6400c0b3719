"""The worker's end of the link: one thread that receives, sends heartbeats, and watches the agent.

The agent's pidfd reports its death. A connection that ends while the agent is alive is
reestablished.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import ClassVar

import tenacity

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import LinkError
from elastic.link import forks
from elastic.link.handshake import AgentConnection, handshake, key_path, read_key
from elastic.link.outbox import Outbox
from elastic.link.peer import has_ended
from elastic.link.protocol import (
    FROM_AGENT,
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    ClientHandshakeRequest,
    Heartbeat,
    Message,
    decode,
    encode,
)
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.frames import FrameReader, frame
from elastic.secure_channel.keys import SecretKey
from elastic.telemetry.log import get_logger
from elastic.tuning.worker_intervals import (
    LINK_CLOSE_S,
    LINK_CONNECT_AGAIN_S,
    LINK_CONNECT_S,
    LINK_FIRST_PAUSE_S,
    LINK_FLUSH_S,
    LINK_HEARTBEAT_S,
    LINK_LONGEST_PAUSE_S,
)

_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL


class LinkClient:
    """Created by :meth:`connect`; its owner calls ``close``.

    ``on_message``, ``on_agent_death`` and ``heartbeat``, which returns the worker's position, run
    on the thread ``elastic-link-client``. In a forked child the client does nothing.
    """

    # Of two clients for one agent in one process, the older one does not reconnect: the agent
    # closes the older of two connections, so the clients would displace each other endlessly.
    _latest: ClassVar[dict[str, int]] = {}
    _serials: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(
        self,
        path: str,
        *,
        local_rank: int,
        on_message: Callable[[Message], None],
        on_agent_death: Callable[[], None],
        heartbeat: Callable[[], Heartbeat],
        heartbeat_every_s: float,
        clock: Clock,
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._on_agent_death = on_agent_death
        self._heartbeat = heartbeat
        self._heartbeat_every_s = heartbeat_every_s
        self._clock = clock
        self._serial = next(self._serials)
        self._pid = os.getpid()
        self._request = ClientHandshakeRequest(
            version=PROTOCOL_VERSION,
            pid=self._pid,
            local_rank=local_rank,
            library=importlib.metadata.version("torch-elastic-harness"),
        )
        self._outbox = Outbox()
        self._key: SecretKey | None = None
        self._socket: socket.socket | None = None
        self._agent = -1  # pidfd
        self._received = FrameReader(MAX_MESSAGE)
        self._undelivered: list[Message] = []
        self._next_heartbeat_s = 0.0
        self._pause_s = LINK_FIRST_PAUSE_S
        self._waker, self._wakee = socket.socketpair()
        for sock in (self._waker, self._wakee):
            sock.setblocking(False)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elastic-link-client", daemon=True)

    @classmethod
    def connect(
        cls,
        path: str,
        *,
        local_rank: int,
        on_message: Callable[[Message], None],
        on_agent_death: Callable[[], None],
        heartbeat: Callable[[], Heartbeat],
        heartbeat_every_s: float = LINK_HEARTBEAT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> LinkClient:
        """Perform the handshake, start the thread. Raises LinkError."""
        client = cls(
            path,
            local_rank=local_rank,
            on_message=on_message,
            on_agent_death=on_agent_death,
            heartbeat=heartbeat,
            heartbeat_every_s=heartbeat_every_s,
            clock=clock,
        )
        before = cls._latest.get(path)
        cls._latest[path] = client._serial  # before the agent hangs up on the older one
        try:
            client._attach(client._first_handshake())
        except BaseException:
            client._release()
            if before is not None:
                cls._latest[path] = before
            raise
        client._thread.start()
        return client

    def sockets(self) -> tuple[int, ...]:
        """File descriptors that a forked child must not keep. (An inherited pidfd does no harm.)"""
        sock = self._socket
        ours = [self._waker.fileno(), self._wakee.fileno(), sock.fileno() if sock else -1]
        return tuple(fd for fd in ours if fd >= 0)

    def send(self, message: Message) -> None:
        """Send to the agent, in order, from any thread; never blocks. Messages to a dead agent are
        dropped."""
        if os.getpid() != self._pid or self._closing:
            return
        if not self._outbox.put(frame(encode(message))):
            get_logger().warning("link: the agent does not read its messages; dropped %s", message)
        if not self._outbox.flush():
            self._wake()

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat, unless earlier messages are still unsent."""
        if self._outbox.is_empty:
            self.send(heartbeat)

    def close(self) -> None:
        """Send queued messages, stop and join. Idempotent; may be called from a callback."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- connecting ---------------------------------------------------------------------------

    def _first_handshake(self) -> AgentConnection:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(OSError),
            stop=tenacity.stop_after_delay(LINK_CONNECT_S),
            wait=tenacity.wait_fixed(LINK_CONNECT_AGAIN_S),
            sleep=self._clock.sleep,
            reraise=True,
        )
        deadline_s = self._clock.monotonic() + LINK_CONNECT_S
        try:
            return attempts(self._handshake, deadline_s)
        except OSError as error:
            raise LinkError(
                f"the agent at {self._path} does not answer: {error}",
                hint="ELASTIC_LINK is set by the agent; workers must run on its machine",
            ) from error

    def _handshake(self, deadline_s: float) -> AgentConnection:
        if self._key is None:  # once: a cleaner of /tmp may remove the file
            self._key = read_key(self._path)
        return handshake(
            self._path,
            self._request,
            key=self._key,
            deadline_s=deadline_s,
            stop=self._wakee.fileno(),
            clock=self._clock,
        )

    def _attach(self, connection: AgentConnection) -> None:
        if self._agent >= 0:
            os.close(self._agent)
        self._socket, self._agent = connection.sock, connection.agent
        self._received = connection.received
        self._undelivered = connection.messages
        forks.cover(self.sockets())
        self._outbox.attach(connection.sock)

    def _reconnect(self) -> None:
        if self._latest.get(self._path) != self._serial:
            self._closing = True
            return
        if self._agent >= 0 and has_ended(self._agent):
            self._end_with_agent()
            return
        try:
            self._attach(self._handshake(self._clock.monotonic() + LINK_CONNECT_S))
            self._pause_s = LINK_FIRST_PAUSE_S
        except (OSError, LinkError) as error:
            if self._agent < 0 and isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
                self._end_with_agent()  # without a pidfd, only the socket shows its death
                return
            if (
                self._pause_s == 2 * LINK_FIRST_PAUSE_S
            ):  # a dying agent's socket ends before its process
                get_logger().warning("link: connecting to the agent again: %s", error)
            _poll({self._agent: select.POLLIN, self._wakee.fileno(): select.POLLIN}, self._pause_s)
            self._pause_s = min(LINK_LONGEST_PAUSE_S, 2 * self._pause_s)

    def _disconnect(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            self._outbox.detach()
            forks.uncover([sock.fileno()])
            sock.close()

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_once()
            self._send_queued()
        except Exception:  # noqa: BLE001  logged, and the worker ends
            get_logger().exception("the link to the agent broke; the worker ends")
            self._on_agent_death()
        finally:
            self._release()

    def _run_once(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakee.recv(4096)
        if self._closing:
            return
        sock = self._socket
        if sock is None:
            self._reconnect()
            return
        undelivered, self._undelivered = self._undelivered, []
        self._deliver(undelivered)
        events = self._wait(sock)
        if self._agent in events:
            self._end_with_agent()
            return
        mask = events.get(sock.fileno(), 0)
        if mask & select.POLLOUT:
            self._outbox.flush(wait_s=LINK_FLUSH_S)
        if mask & _READABLE:
            self._read(sock)

    def _wait(self, sock: socket.socket) -> dict[int, int]:
        """Wait for an event or for the time of the next heartbeat; send a heartbeat that is due."""
        now = self._clock.monotonic()
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._heartbeat_every_s
            self.send_heartbeat(self._heartbeat())
        unsent = 0 if self._outbox.is_empty else select.POLLOUT
        wanted = {
            self._agent: select.POLLIN,
            self._wakee.fileno(): select.POLLIN,
            sock.fileno(): select.POLLIN | unsent,
        }
        return _poll(wanted, self._next_heartbeat_s - self._clock.monotonic())

    def _read(self, sock: socket.socket) -> None:
        try:
            chunk = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if chunk:
            self._received.feed(chunk)
            self._deliver(self._complete_messages())
        else:
            self._disconnect()

    def _complete_messages(self) -> list[Message]:
        messages = []
        try:
            while (payload := self._received.next()) is not None:
                messages.append(decode(payload))
        except ProtocolError as error:
            raise LinkError(f"the agent sent an invalid message: {error}") from error
        return messages

    def _deliver(self, messages: list[Message]) -> None:
        for message in messages:
            if not isinstance(message, FROM_AGENT):
                raise LinkError(f"the agent sent a message that only workers send: {message}")
            self._on_message(message)

    def _end_with_agent(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # a killed agent cannot remove it
            os.unlink(self._path)
            os.unlink(key_path(self._path))
            os.rmdir(os.path.dirname(self._path))
        self._on_agent_death()

    def _send_queued(self) -> None:
        until_s = self._clock.monotonic() + LINK_CLOSE_S
        while self._socket is not None and not self._outbox.flush(wait_s=LINK_FLUSH_S):
            left_s = until_s - self._clock.monotonic()
            events = _poll({self._socket.fileno(): select.POLLOUT}, left_s)
            if left_s <= 0 or any(event & _READABLE for event in events.values()):
                return  # the agent does not read, or has closed the connection

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
            self._waker.send(b"x")

    def _release(self) -> None:
        forks.uncover(self.sockets())
        self._disconnect()
        self._waker.close()
        self._wakee.close()
        if self._agent >= 0:
            os.close(self._agent)
            self._agent = -1
        if self._latest.get(self._path) == self._serial:
            del self._latest[self._path]


def _poll(wanted: dict[int, int], timeout_s: float) -> dict[int, int]:
    """The events by descriptor. poll, because select supports no descriptor above 1023."""
    poll = select.poll()
    for fd, events in wanted.items():
        if fd >= 0:
            poll.register(fd, events)
    return dict(poll.poll(max(0.0, timeout_s) * 1000))
