"""Probes over HTTP: ``/livez`` and ``/readyz`` of an agent, and ``/metrics`` on the same port."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from elastic.agent.node import NodeStatus
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError
from elastic.membership.records import Done, Node, NodeState, WorldRecord
from elastic.telemetry.log import get_logger
from elastic.wire.messages import WorldState

# An agent's thread without progress for this long is hung. Torch gives stopped workers 30 s, and
# waits as long again after SIGKILL (elastic/multiprocessing/api.py, 2.11 to 2.15); its main thread
# does nothing else in the meantime.
HUNG_AFTER_S = 1.5 * 60.0
# A connection to a probe or to /metrics is closed after this: clients send one short request.
HEALTH_CONNECTION_S = 2.0
# The server's thread runs this often, and closes expired connections.
HEALTH_TURN_S = 0.2
# Pause after no file descriptor was free for a connection.
HEALTH_ACCEPT_AGAIN_S = 0.05

# ----------------------------------------------------------------------------
# An agent's responses to ``/livez`` and ``/readyz``. Pure: facts in, a verdict out.
#
# *Live* means that the agent's own threads make progress. Nothing else matters: killing an agent
# does not repair a job that is paused, waits for nodes or has lost etcd, but harms it.
#
# *Ready* means that this node's workers are in the current world, which may be paused.


class Answer(Protocol):
    """The response for a path of the health server."""

    @property
    def status(self) -> HTTPStatus:
        """The HTTP status."""
        ...

    @property
    def content_type(self) -> str:
        """The Content-Type header."""
        ...

    def body(self) -> bytes:
        """The body of the response."""
        ...


@dataclass(frozen=True)
class HealthStatus:
    """The result of a probe, and the reason. ``details`` are added to the body."""

    is_ok: bool
    reason: str
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def status(self) -> HTTPStatus:
        """200 or 503: kubelets evaluate only this."""
        return HTTPStatus.OK if self.is_ok else HTTPStatus.SERVICE_UNAVAILABLE

    @property
    def content_type(self) -> str:
        """The Content-Type header."""
        return "application/json"

    def body(self) -> bytes:
        """One line of JSON."""
        return (
            json.dumps({"ok": self.is_ok, "reason": self.reason, **self.details}).encode() + b"\n"
        )


Routes = Mapping[str, Callable[[], Answer]]


def routes_of(status: NodeStatus) -> Routes:
    """The paths and their responses. They take no lock: a hung thread that holds one must not
    block the response that reports it."""
    return {
        "/livez": lambda: liveness(status.watchdog.silences_s()),
        "/readyz": lambda: readiness(
            status.node,
            status.world,
            status.done,
            is_parked=status.parked,
            waits_for=status.waits_for,
        ),
    }


def liveness(silences_s: Mapping[str, float]) -> HealthStatus:
    """Whether every thread has made progress within HUNG_AFTER_S."""
    for thread, silent_s in silences_s.items():
        if silent_s > HUNG_AFTER_S:
            return HealthStatus(
                False,
                f"{thread} has made no progress for {silent_s:.1f} s "
                f"(the limit is {HUNG_AFTER_S:g} s)",
            )
    return HealthStatus(True, "the agent's threads make progress")


def readiness(
    node: Node,
    world: WorldRecord | None,
    done: Done | None,
    *,
    is_parked: bool,
    waits_for: str = "",
) -> HealthStatus:
    """Whether this node's workers are in the current world."""
    is_ready, reason = _is_in_world(node, world, done)
    if waits_for and not is_ready:
        reason = f"{node.name} waits: {waits_for}; {reason}"
    details: dict[str, object] = {"node": node.name, "parked": is_parked}
    if world is not None:
        details["world"] = {
            "generation": world.generation,
            "state": world.state.value,
            "nodes": len(world.members),
            "size": world.size,
        }
    if done is not None:
        details["job"] = {
            "outcome": done.outcome.value,
            "exit_code": done.exit_code,
            "reason": done.reason,
        }
    return HealthStatus(is_ready, reason, details)


def _is_in_world(node: Node, world: WorldRecord | None, done: Done | None) -> tuple[bool, str]:
    if done is not None:
        return False, f"the job has ended: {done.outcome.value}: {done.reason}"
    if (reason := _NOT_IN_A_WORLD.get(node.state)) is not None:
        return False, reason
    if node.running is None:
        return False, _without_world(node)
    if world is None:  # the store was wiped: the running world is valid
        return True, f"in generation {node.running.generation}"
    if node.node_id not in world.node_ids:
        return False, f"generation {world.generation} continues without this node: {world.reason}"
    behind = node.running.generation < world.generation
    if behind and world.switch_at_step is None:
        return False, f"the workers change to generation {world.generation}: {world.reason}"
    if world.state is WorldState.PAUSED:
        return True, f"in generation {world.generation}, which is paused: {world.reason}"
    return True, f"in generation {node.running.generation}"


_NOT_IN_A_WORLD = {
    NodeState.LEAVING: "this node was asked to leave",
    NodeState.FAILED: "this node's workers have failed",
    NodeState.FINISHED: "this node's workers have succeeded; it waits for those of the other nodes",
}


def _without_world(node: Node) -> str:
    failed = f"; its workers failed before: {node.failure}" if node.failure else ""
    if node.state is NodeState.READY:
        return "the workers are ready, and wait for a world that includes them"
    if node.state is NodeState.STARTING:
        return "the workers are warming up"
    return f"waiting for a world{failed}"


# ----------------------------------------------------------------------------
# ``/livez``, ``/readyz`` and ``/metrics`` over plain HTTP, for probes and scrapers.
#
# The standard library's server gives each connection a thread, but has no limits. Here each
# connection has two seconds in total and :data:`MAX_REQUEST` bytes, and if there are too many, the
# oldest one is closed. There is no authentication: nothing served here is secret
# (docs/security.md).

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
