"""``/livez`` and ``/readyz`` over plain HTTP, for probes.

One thread, which no client can hold up: requests are read without blocking, each connection has
two seconds in all, and when there are too many the oldest goes. ``http.server`` reads the request
and writes the answer; its own servers read from one client at a time, or give each a thread.
"""

from __future__ import annotations

import contextlib
import errno
import io
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler

from elastic.agent.health import Routes
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.telemetry.log import get_logger

MAX_CONNECTIONS = 32
MAX_REQUEST = 8192  # bytes, headers included
CONNECTION_S = 2.0
_TURN_S = 0.2
_END_OF_HEAD = b"\r\n\r\n"


class HealthServer:
    """Serves from ``start`` to ``close``, on all addresses: kubelets ask at the pod's.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(
        self,
        port: int,
        routes: Routes,
        *,
        on_error: Callable[[BaseException], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._routes = routes
        self._on_error = on_error
        self._clock = clock
        self._listener = _listen(port)
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakee = socket.socketpair()
        self._connections: list[_Connection] = []  # oldest first
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-health", daemon=True)

    @property
    def port(self) -> int:
        """The one asked for, or the kernel's choice."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop and join. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.close()  # the thread sees the end of the pair
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._release()

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            for sock in (self._listener, self._wakee):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
            while not self._closing.is_set():
                self._turn()
        except BaseException as error:
            get_logger().exception("the health server died")
            self._on_error(error)
            raise
        finally:
            self._release()

    def _release(self) -> None:
        for connection in tuple(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listener.close()
        self._wakee.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(_TURN_S if self._connections else None):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self._connections:  # or dropped earlier in this round
                self._read(key.data)
        now = self._clock.monotonic()
        for connection in [c for c in self._connections if now > c.until_s]:
            self._drop(connection)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left: the next one tries
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(self._connections[0])
        client.setblocking(False)
        connection = _Connection(client, self._clock.monotonic() + CONNECTION_S)
        self._connections.append(connection)
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.client.recv(MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        complete = _END_OF_HEAD in connection.received
        if data and not complete and len(connection.received) < MAX_REQUEST:
            return
        if complete:
            self._answer(connection)
        self._drop(connection)

    def _answer(self, connection: _Connection) -> None:
        answer = _Exchange(bytes(connection.received), self._routes).answer
        try:
            # A new socket's buffer takes far more than an answer.
            connection.client.send(answer)
        except OSError:  # the client has gone
            return

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.client)
        connection.client.close()


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    until_s: float
    received: bytearray = field(default_factory=bytearray)


class _Exchange(BaseHTTPRequestHandler):
    """One request that has been received, and its answer: ``http.server`` without a socket."""

    server_version = "elastic"
    sys_version = ""

    def __init__(self, request: bytes, routes: Routes) -> None:
        # Not the base's, which would read from a socket.
        self._routes = routes
        self.rfile = io.BytesIO(request)
        self.wfile = written = io.BytesIO()
        self.client_address = ("", 0)
        self.handle_one_request()
        self.answer = written.getvalue()

    def do_GET(self) -> None:
        route = self._routes.get(self.path.partition("?")[0])
        if route is None:
            self.send_error(HTTPStatus.NOT_FOUND, f"known: {', '.join(self._routes)}")
            return
        verdict = route()
        body = verdict.body()
        self.send_response(HTTPStatus.OK if verdict.is_ok else HTTPStatus.SERVICE_UNAVAILABLE)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """A probe every few seconds is no news."""


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(_NoIPv6):
                return _bind(port, socket.AF_INET6)
        return _bind(port, socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"health_port={port} cannot be had: {error}",
            hint="give another ELASTIC_HEALTH_PORT; 0 lets the kernel choose, which several "
            "agents on one machine need",
        ) from error


class _NoIPv6(Exception):
    """The kernel knows IPv6, and this machine has none of its addresses."""


def _bind(port: int, family: socket.AddressFamily) -> socket.socket:
    both = family == socket.AF_INET6
    try:
        return socket.create_server(
            ("", port), family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=both
        )
    except OSError as error:
        if both and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise _NoIPv6 from error
        raise
