"""``/livez``, ``/readyz`` and ``/metrics`` over plain HTTP, for probes and scrapers.

The standard library's server gives each connection a thread, but has no limits. Here each
connection has two seconds in total and :data:`MAX_REQUEST` bytes, and if there are too many, the
oldest one is closed. There is no authentication: nothing served here is secret (docs/security.md).
"""

from __future__ import annotations

import contextlib
import errno
import io
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.health.endpoints import Routes
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_intervals import HEALTH_ACCEPT_AGAIN_S, HEALTH_CONNECTION_S, HEALTH_TURN_S

MAX_CONNECTIONS = 32
_BACKLOG = 512  # if it is full, clients retry only after a second
MAX_REQUEST = 8192  # bytes, headers included


class HealthServer:
    """Serves from ``start`` to ``close``, on all addresses: kubelets probe the pod's address.

    Raises:
        ConfigError: the port cannot be bound.
    """

    def __init__(
        self,
        port: int,
        routes: Routes,
        *,
        on_error: Callable[[BaseException], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._server = _BoundedServer(_listen(port), routes, clock)
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name="elastic-health", daemon=True)

    @property
    def port(self) -> int:
        """The configured port, or the one chosen by the kernel."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop and join. Idempotent."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _run(self) -> None:
        try:
            self._server.serve_forever(poll_interval=HEALTH_TURN_S)
        except BaseException as error:
            get_logger().exception("the health server died")
            self._on_error(error)
            raise


class _BoundedServer(ThreadingHTTPServer):
    """The standard library's server, with bounds for connections."""

    def __init__(self, listener: socket.socket, routes: Routes, clock: Clock) -> None:
        super().__init__(("", 0), _Exchange, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.routes = routes
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: dict[socket.socket, float] = {}  # of each connection; oldest first
        self._serving: set[threading.Thread] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:  # closed already, or no descriptors left: avoids a busy loop
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._clock.sleep(HEALTH_ACCEPT_AGAIN_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Like the base class, whose threads have no name and, as daemons, are never joined."""
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="elastic-health-connection",
            daemon=True,
        )
        with self._lock:
            while len(self._until_s) >= MAX_CONNECTIONS:
                self._end(next(iter(self._until_s)))
            self._until_s[request] = self._clock.monotonic() + HEALTH_CONNECTION_S
        thread.start()
        with self._lock:
            self._serving = {one for one in self._serving if one.is_alive()} | {thread}

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._until_s.pop(request, None)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by ``serve_forever`` at least every ``HEALTH_TURN_S``."""
        now_s = self._clock.monotonic()
        with self._lock:
            for request in [r for r, until_s in self._until_s.items() if now_s > until_s]:
                self._end(request)

    def server_close(self) -> None:
        """Free the port, close all connections, join their threads."""
        super().server_close()
        with self._lock:
            for request in list(self._until_s):
                self._end(request)
        for thread in self._serving:
            thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has closed, or was closed, is not an error."""

    def _end(self, request: socket.socket) -> None:
        """Shut the connection down. Its thread sees the end of the stream and closes the socket,
        which must not be closed while it is in use."""
        del self._until_s[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _FirstBytes(io.RawIOBase):
    """The first :data:`MAX_REQUEST` bytes of a connection; then it appears to have ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MAX_REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer)[: self._left]
        count = self._connection.recv_into(into) if into else 0
        self._left -= count
        return count


class _Exchange(BaseHTTPRequestHandler):
    """One request and its response."""

    server: _BoundedServer
    server_version = "elastic"
    sys_version = ""
    timeout = HEALTH_CONNECTION_S

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_FirstBytes(self.connection))

    def do_GET(self) -> None:
        routes = self.server.routes
        route = routes.get(self.path.partition("?")[0])
        if route is None:
            self.send_error(HTTPStatus.NOT_FOUND, f"known: {', '.join(routes)}")
            return
        answer = route()
        body = answer.body()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Probes every few seconds are not logged."""


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(_NoIPv6):
                return _bind(port, socket.AF_INET6)
        return _bind(port, socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"health_port={port} could not be bound: {error}",
            hint="set another ELASTIC_HEALTH_PORT; 0 selects any free port, which several "
            "agents on one machine need",
        ) from error


class _NoIPv6(Exception):
    """The kernel supports IPv6, but this machine has no such address."""


def _bind(port: int, family: socket.AddressFamily) -> socket.socket:
    both = family == socket.AF_INET6
    try:
        return socket.create_server(
            ("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        if both and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise _NoIPv6 from error
        raise
