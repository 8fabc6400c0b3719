"""The worker's end of the link: one thread that reads, beats, and watches the agent's pidfd."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import select
import socket
import struct
import threading
from collections.abc import Callable

import tenacity

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import LinkError
from elastic.link import forks
from elastic.link.protocol import (
    MAX_LINE,
    PROTOCOL_VERSION,
    Beat,
    Hello,
    Message,
    Welcome,
    decode,
    encode,
)
from elastic.telemetry.log import get_logger

CONNECT_WITHIN_S = 10.0
SEND_TIMEOUT_S = 0.5
_CREDENTIALS = struct.Struct("3i")


class LinkClient:
    """Made by :meth:`connect`; owned by whoever calls ``close``.

    ``on_message`` and ``on_agent_death`` run on the thread ``elastic-link-client``.
    """

    def __init__(
        self,
        path: str,
        *,
        local_rank: int,
        on_message: Callable[[Message], None],
        on_agent_death: Callable[[], None],
        beat: Callable[[], Beat],
        beat_every_s: float = 0.2,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._path = path
        self._local_rank = local_rank
        self._on_message = on_message
        self._on_agent_death = on_agent_death
        self._beat = beat
        self._beat_every_s = beat_every_s
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._agent = -1  # pidfd
        self._received = b""
        self._waker, self._wakee = socket.socketpair()
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
        beat: Callable[[], Beat],
        beat_every_s: float = 0.2,
        clock: Clock = SYSTEM_CLOCK,
    ) -> LinkClient:
        """Say hello, wait for the welcome, start the thread. Raises LinkError."""
        client = cls(
            path,
            local_rank=local_rank,
            on_message=on_message,
            on_agent_death=on_agent_death,
            beat=beat,
            beat_every_s=beat_every_s,
            clock=clock,
        )
        client._say_hello()
        client._thread.start()
        return client

    def sockets(self) -> tuple[int, ...]:
        """File descriptors that a forked child must not keep."""
        sock = self._socket
        ours = [self._waker.fileno(), self._wakee.fileno(), self._agent]
        return tuple(fd for fd in [*ours, sock.fileno() if sock else -1] if fd >= 0)

    def send(self, message: Message) -> None:
        """Tell the agent; lost while there is no connection. From any thread, in order."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._socket is None:
                return
            try:
                self._socket.sendall(encode(message))
            except OSError:  # half a line may be out: this connection is of no use any more
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop and join. Idempotent; also from a callback."""
        if os.getpid() != self._pid or self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- connecting ---------------------------------------------------------------------------

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(OSError),
        stop=tenacity.stop_after_delay(CONNECT_WITHIN_S),
        wait=tenacity.wait_fixed(0.1),
        reraise=True,
    )
    def _open(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_WITHIN_S)
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        return sock

    def _say_hello(self) -> None:
        try:
            sock = self._open()
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            agent = os.pidfd_open(_CREDENTIALS.unpack(raw)[0])
            sock.sendall(
                encode(
                    Hello(
                        version=PROTOCOL_VERSION,
                        pid=self._pid,
                        local_rank=self._local_rank,
                        library=importlib.metadata.version("torch-elastic-harness"),
                    )
                )
            )
            self._received = b""
            messages: list[Message] = []
            while not any(isinstance(m, Welcome) for m in messages):
                chunk = sock.recv(1 << 16)
                if not chunk:
                    raise LinkError(
                        f"the agent at {self._path} refused this worker",
                        hint="its log says why",
                    )
                messages += self._parse(chunk)
        except OSError as error:
            raise LinkError(
                f"the agent at {self._path} does not answer: {error}",
                hint="ELASTIC_LINK is set by the agent; workers must run on its machine",
            ) from error
        sock.settimeout(SEND_TIMEOUT_S)
        with self._lock:
            if self._agent >= 0:
                os.close(self._agent)
            self._socket, self._agent = sock, agent
        forks.cover(self.sockets())
        for message in messages:
            self._tell(message)

    def _parse(self, chunk: bytes) -> list[Message]:
        *lines, self._received = (self._received + chunk).split(b"\n")
        if len(self._received) > MAX_LINE:
            raise LinkError(f"the agent sent a line of more than {MAX_LINE} bytes")
        return [decode(line) for line in lines]

    def _tell(self, message: Message) -> None:
        if not isinstance(message, Welcome):
            self._on_message(message)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:  # noqa: BLE001  logged, and the worker ends
            get_logger().exception("the link to the agent broke; the worker ends")
            self._on_agent_death()
        finally:
            self._release()

    def _turn(self) -> None:
        sock = self._socket
        if sock is None:
            self._reconnect()
            return
        readable = _readable([self._agent, self._wakee.fileno(), sock.fileno()], self._beat_every_s)
        if self._closing:
            return
        if self._agent in readable:
            self._on_agent_death()
            self._closing = True
        elif sock.fileno() in readable:
            self._read(sock)
        elif not readable:
            self.send(self._beat())

    def _read(self, sock: socket.socket) -> None:
        try:
            chunk = sock.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            chunk = b""
        if chunk:
            for message in self._parse(chunk):
                self._tell(message)
            return
        self._disconnect()

    def _disconnect(self) -> None:
        with self._lock:
            sock, self._socket = self._socket, None
        if sock is not None:
            forks.uncover([sock.fileno()])
            sock.close()

    def _reconnect(self) -> None:
        """The agent lives, as its pidfd says, and the connection is gone: say hello again."""
        if _readable([self._agent], 0.0):
            self._on_agent_death()
            self._closing = True
            return
        try:
            self._say_hello()
        except LinkError as error:
            if not self._closing:
                get_logger().warning("link: %s", error)
                _readable([self._agent, self._wakee.fileno()], 1.0)

    def _release(self) -> None:
        forks.uncover(self.sockets())
        self._disconnect()
        for fd in (self._waker, self._wakee):
            fd.close()
        if self._agent >= 0:
            os.close(self._agent)
            self._agent = -1


def _readable(fds: list[int], timeout_s: float) -> list[int]:
    """Those that can be read; by poll, since select knows no descriptor above 1023."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(timeout_s * 1000)]
