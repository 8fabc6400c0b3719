"""The dashboard's web server: who may read it, the page, its API, and limits of connections."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import socket
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic.agent.identity import is_loopback
from elastic.cli.dashboard_feed import (
    UNKNOWN,
    JobFeed,
    JobSnapshot,
    event_document,
    live_page,
    status_document,
)
from elastic.cli.status import SCHEMA
from elastic.cli.view import JobCondition
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError
from elastic.report import render
from elastic.telemetry.log import printable
from elastic.tuning.intervals import DASHBOARD_DRAIN_S

# A request to the dashboard must arrive completely within this: its few headers fit one packet.
DASHBOARD_REQUEST_S = 10.0
# An idle connection of a page is closed after this: pages ask every second.
DASHBOARD_IDLE_S = 15.0
# All clients get the same bytes for this long, unless the job has changed.
DASHBOARD_PAGE_S = 0.5

# ----------------------------------------------------------------------------
# Access control of the page: pure decisions on the headers of a request.
#
# On loopback every user of the machine has access unless a token is set. A web site whose name is
# resolved to 127.0.0.1 (DNS rebinding) is detected by the Host header. On any other address a
# token is required: as ``Authorization: Bearer``, or once as ``?token=``, which sets a cookie.

MIN_TOKEN = 16  # characters
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# kubelet and load balancers have no token; the check reveals only whether the server is alive.
OPEN_PATHS = frozenset({"/healthz"})


class AccessVerdict(Enum):
    """The decision on a request."""

    ALLOWED = "allowed"
    WRONG_HOST = "wrong host"
    NO_TOKEN = "no token"
    TOKEN_IN_QUERY = "token in query"  # correct: set the cookie and redirect to the URL without it


@dataclass(frozen=True)
class AccessPolicy:
    """``token``: None requires none. ``hosts``: the accepted Host headers; None accepts all."""

    token: str | None
    hosts: frozenset[str] | None
    cookie: str = "elastic-dashboard"

    def judge(
        self, *, host: str, path: str, authorization: str, cookie: str, query_token: str
    ) -> AccessVerdict:
        """Credentials of one request. ``cookie``: the value of the dashboard's cookie."""
        if self.hosts is not None and host_name(host) not in self.hosts:
            return AccessVerdict.WRONG_HOST
        if self.token is None or path in OPEN_PATHS:
            return AccessVerdict.ALLOWED
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and _is_same(given.strip(), self.token):
            return AccessVerdict.ALLOWED
        if _is_same(cookie, self.cookie_value):
            return AccessVerdict.ALLOWED
        if path == "/" and _is_same(query_token, self.token):
            return AccessVerdict.TOKEN_IN_QUERY
        return AccessVerdict.NO_TOKEN

    @property
    def cookie_value(self) -> str:
        """A value that proves knowledge of the token without containing it."""
        token = (self.token or "").encode()
        return hmac.new(token, b"elastic dashboard cookie", hashlib.sha256).hexdigest()


def policy_of(
    host: str, port: int, token: str | None, allowed_hosts: tuple[str, ...] = ()
) -> AccessPolicy:
    """The policy of a server at ``host``. Raises ConfigError if it would be open to a network."""
    is_local = is_loopback(host)
    if not is_local and token is None:
        raise ConfigError(
            f"--host={host} would show the job to the network without a token",
            hint="head -c 24 /dev/urandom | base64 > token; elastic dashboard "
            f"--host={host} --token-file=token",
        )
    extra = frozenset(host_name(name) for name in allowed_hosts)
    if is_local:
        hosts: frozenset[str] | None = LOOPBACK_NAMES | {host_name(host)} | extra
    else:
        hosts = extra or None  # a rebound site does not receive a cookie set under another name
    return AccessPolicy(token, hosts, f"elastic-dashboard-{port}")


def host_name(header: str) -> str:
    """The name in a Host header, without the port.

    >>> [host_name(h) for h in ("Localhost.:80", "[::1]:80", "::1", "10.0.0.1")]
    ['localhost', '::1', '::1', '10.0.0.1']
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    if header.count(":") == 1:
        header = header.partition(":")[0]
    return header.rstrip(".")


def read_token(path: str) -> str:
    """The token in the first line of a file. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file={path} cannot be read: {error}",
            hint="name a file that contains the token",
        ) from error
    return checked_token(lines[0].strip() if lines else "", f"--token-file={path}")


def checked_token(token: str, place: str) -> str:
    """The token. Raises ConfigError if it is too short, or no header can hold it."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{place}: a token has at least {MIN_TOKEN} printable ASCII characters and no spaces",
            hint="head -c 24 /dev/urandom | base64 > token",
        )
    return token


def _is_same(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode())


# ----------------------------------------------------------------------------
# ``/metrics`` of the dashboard: the job as a whole, as gauges (prometheus-client).
#
# Agents serve metrics per node; these describe the job and end with it.

_GAUGES = (  # name, help, field of the status document
    ("generation", "Generation of the newest world", "generation"),
    ("step", "Steps committed", "step"),
    ("planned_steps", "Total number of steps planned by the script", "planned_steps"),
    ("steps_per_second", "Step rate while the job trains", "steps_per_s"),
    ("eta_seconds", "Time until the last planned step", "eta_s"),
    ("checkpoint_step", "Step of the last committed checkpoint", "checkpoint_step"),
    ("checkpoint_age_seconds", "Age of the last committed checkpoint", "checkpoint_age_s"),
)


def exposition(status: Mapping[str, Any]) -> tuple[bytes, str]:
    """The page and its content type, from the document of ``/api/status``; an unknown number has no
    sample. Raises ImportError without prometheus-client."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

    registry, source = CollectorRegistry(), status["source"]
    run_id = printable(status["run_id"], 100)

    def gauge(name: str, help: str, value: float | None) -> None:
        metric = Gauge(f"elastic_job_{name}", f"{help}.", ("run_id",), registry=registry)
        if value is not None:
            metric.labels(run_id).set(value)

    def by_state(name: str, help: str, values: Mapping[str, float]) -> None:
        labels = ("run_id", "state")
        metric = Gauge(f"elastic_job_{name}", help, labels, registry=registry)
        for state, value in values.items():
            metric.labels(run_id, state).set(value)

    states = [*(condition.value for condition in JobCondition), UNKNOWN]
    current = {state: float(state == status["state"]) for state in states}
    by_state("state", "1 for the job's current state, else 0", current)
    for name, help, field in _GAUGES:
        gauge(name, help, status.get(field))
    goodput = source["journal_goodput"]
    goodput = status.get("goodput") if goodput is None else goodput
    gauge("goodput_ratio", "Fraction of time spent in steps that count", goodput)
    nodes = Counter(node["state"] for node in status.get("nodes", ()))
    by_state("nodes", "Live nodes, by state", dict(sorted(nodes.items())))
    gauge("etcd_up", "0 while etcd does not answer the dashboard", float(not source["outage"]))
    gauge("view_age_seconds", "Time since etcd last answered", source["view_age_s"])
    return generate_latest(registry), CONTENT_TYPE_LATEST


# ----------------------------------------------------------------------------
# Filters requests before the application: methods, hosts and tokens of requests, and response
# headers.

_METHODS = ("GET", "HEAD")
_LONGEST_QUERY = 2048


class RequestFilter:
    """ASGI middleware. ``content_policy``: the Content-Security-Policy of every answer."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy, content_policy: str) -> None:
        self._app = app
        self._policy = policy
        self._headers: Mapping[str, str] = {
            "Content-Security-Policy": content_policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # "lifespan"; there are no web sockets
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The response that replaces the application's, or None."""
        if request.method not in _METHODS:
            return PlainTextResponse(
                "this page is read-only: GET and HEAD only\n",
                status_code=405,
                headers={"Allow": ", ".join(_METHODS)},
            )
        if len(request.scope["query_string"]) > _LONGEST_QUERY:
            return PlainTextResponse("the query is too long\n", status_code=414)
        return self._answer(self._verdict(request))

    def _verdict(self, request: Request) -> AccessVerdict:
        headers: Headers = request.headers
        return self._policy.judge(
            host=headers.get("host", ""),
            path=request.url.path,
            authorization=headers.get("authorization", ""),
            cookie=request.cookies.get(self._policy.cookie, ""),
            query_token=request.query_params.get("token", ""),
        )

    def _answer(self, verdict: AccessVerdict) -> Response | None:
        match verdict:
            case AccessVerdict.ALLOWED:
                return None
            case AccessVerdict.WRONG_HOST:
                return PlainTextResponse(
                    "the dashboard does not serve this host name: use localhost, or start it with "
                    "--allowed-host NAME\n",
                    status_code=421,
                )
            case AccessVerdict.TOKEN_IN_QUERY:
                answer = RedirectResponse(".", status_code=303)
                answer.set_cookie(
                    self._policy.cookie, self._policy.cookie_value, httponly=True, samesite="lax"
                )
                return answer
            case AccessVerdict.NO_TOKEN:
                return PlainTextResponse(
                    "the dashboard requires its token: open /?token=TOKEN once in this browser, or "
                    "send Authorization: Bearer TOKEN\n",
                    status_code=401,
                    headers={"WWW-Authenticate": 'Bearer realm="elastic dashboard"'},
                )


# ----------------------------------------------------------------------------
# The routes of the page, as a Starlette application.
#
# The page is rendered when it is requested, a few times per second for any number of clients.
# It refreshes itself with a conditional request: if only ages differ, it counts those itself.

Endpoint = Callable[[Request], Awaitable[Response]]
_AGES = re.compile(r'(<time[^>]*>)[^<]*|(data-rendered=)"[^"]*"')


def application(feed: JobFeed, policy: AccessPolicy, *, clock: Clock = SYSTEM_CLOCK) -> ASGIApp:
    """The page and its API."""
    pages = _Pages(feed, clock)
    routes: dict[str, Endpoint] = {
        "/": pages.page,
        "/healthz": pages.healthz,
        "/metrics": pages.metrics,
        "/api/status": pages.status,
        "/api/events": pages.events,
    }
    app = Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])
    return RequestFilter(app, policy, content_policy())


def content_policy() -> str:
    """Only the page's own style and script are allowed."""
    style, script = (
        b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (render.style(), render.script())
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


class _Pages:
    def __init__(self, feed: JobFeed, clock: Clock) -> None:
        self._feed = feed
        self._clock = clock
        self._server = secrets.token_hex(4)  # tells pages that it was restarted
        self._page = b""
        self._etag = ""
        self._rendered: JobSnapshot | None = None
        self._rendered_s = float("-inf")

    async def page(self, request: Request) -> Response:
        is_old = self._clock.monotonic() - self._rendered_s >= DASHBOARD_PAGE_S
        if is_old or self._feed.snapshot is not self._rendered:
            self._rendered = self._feed.snapshot
            source = live_page(self._feed.current(), self._server)
            lasting = _AGES.sub(r"\1\2", source)
            self._page = source.encode()
            self._etag = f'"{hashlib.sha256(lasting.encode()).hexdigest()[:32]}"'
            self._rendered_s = self._clock.monotonic()
        headers = {"ETag": self._etag}
        if request.headers.get("if-none-match") == self._etag:
            return Response(status_code=304, headers=headers)
        return Response(self._page, media_type="text/html", headers=headers)

    async def status(self, request: Request) -> Response:
        return _json(status_document(self._feed.current()))

    async def events(self, request: Request) -> Response:
        given = request.query_params.get("since", "0")
        if not (given.isascii() and given.isdigit()):
            return PlainTextResponse("since: the number of an event\n", status_code=400)
        since = int(given[:18])
        events = [event_document(e) for e in self._feed.current().events if e.number > since]
        return _json({"schema": SCHEMA, "events": events})

    async def healthz(self, request: Request) -> Response:
        is_ok = self._feed.is_alive
        reason = "the job is being watched" if is_ok else "a thread that watches the job has died"
        return _json({"ok": is_ok, "reason": reason}, status_code=200 if is_ok else 503)

    async def metrics(self, request: Request) -> Response:
        try:
            data, content_type = exposition(status_document(self._feed.current()))
        except ImportError:
            return PlainTextResponse(
                "prometheus-client is not installed: pip install "
                "'torch-elastic-harness[metrics]'\n",
                status_code=501,
            )
        return Response(data, headers={"Content-Type": content_type})


def _json(document: Mapping[str, Any], status_code: int = 200) -> Response:
    """In ASCII: a name may hold what UTF-8 cannot encode."""
    return Response(json.dumps(document), status_code, media_type="application/json")


# ----------------------------------------------------------------------------
# Serves the page with uvicorn until a signal, or until the job feed fails.

_BACKLOG = 512
_MOST_UNFINISHED = 512  # requests; for another one, the oldest connection is closed


class LimitedConnection(H11Protocol):
    """A connection whose requests must arrive in time. uvicorn limits neither the time of a request
    that is never completed nor the number of such connections."""

    unfinished: ClassVar[dict[LimitedConnection, asyncio.TimerHandle]] = {}  # oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        if len(self.unfinished) > _MOST_UNFINISHED:
            next(iter(self.unfinished)).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self not in self.unfinished:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self.unfinished[self] = self.loop.call_later(DASHBOARD_REQUEST_S, self._close)

    def _close(self) -> None:
        self._forget()
        self.transport.close()

    def _forget(self) -> None:
        if (timer := self.unfinished.pop(self, None)) is not None:
            timer.cancel()


def server_of(app: ASGIApp) -> uvicorn.Server:
    """The web server; :func:`serve` runs it."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # URLs may contain the token
            lifespan="off",
            server_header=False,
            ws="none",
            http=LimitedConnection,
            timeout_keep_alive=int(DASHBOARD_IDLE_S),
            timeout_graceful_shutdown=int(DASHBOARD_DRAIN_S),
        )
    )


def serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until a signal ends it."""
    asyncio.run(server.serve(sockets=[listener]))


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"--host={host} --port={port} could not be bound: {error}",
            hint="pass another --port; 0 selects a free one",
        ) from error
    try:
        yield listener
    finally:
        listener.close()
