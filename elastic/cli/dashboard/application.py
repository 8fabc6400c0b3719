"""The routes of the page, as a Starlette application. Responses are rendered in advance."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from elastic.cli.dashboard.access import AccessPolicy
from elastic.cli.dashboard.prometheus_page import exposition
from elastic.cli.dashboard.publisher import (
    MAX_STREAMS,
    Following,
    Publisher,
    api_changes,
    page_changes,
)
from elastic.cli.dashboard.request_filter import RequestFilter
from elastic.cli.dashboard.status_api import event_document
from elastic.cli.observe.status_document import SCHEMA

_EVENT_STREAM = "text/event-stream"
Endpoint = Callable[[Request], Awaitable[Response]]


def application(
    publisher: Publisher, policy: AccessPolicy, is_alive: Callable[[], bool]
) -> ASGIApp:
    """The page, its streams and its API. ``is_alive``: whether the job is still watched."""
    pages = _Pages(publisher, is_alive)
    routes: dict[str, Endpoint] = {
        "/": pages.page,
        "/live": pages.live,
        "/healthz": pages.healthz,
        "/metrics": pages.metrics,
        "/api/status": pages.status,
        "/api/events": pages.events,
    }
    app = Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])
    return RequestFilter(app, policy, publisher.template.policy)


class _Pages:
    def __init__(self, publisher: Publisher, is_alive: Callable[[], bool]) -> None:
        self._publisher = publisher
        self._is_alive = is_alive

    async def page(self, request: Request) -> Response:
        return Response(self._publisher.shown.page, media_type="text/html")

    async def live(self, request: Request) -> Response:
        return self._stream(page_changes)

    async def status(self, request: Request) -> Response:
        return Response(self._publisher.shown.status, media_type="application/json")

    async def events(self, request: Request) -> Response:
        if _EVENT_STREAM in request.headers.get("accept", ""):
            return self._stream(api_changes)
        given = request.query_params.get("since", "0")
        if not (given.isascii() and given.isdigit()):
            return PlainTextResponse("since: the number of an event\n", status_code=400)
        since = int(given[:18])
        found = [event_document(e) for e in self._publisher.shown.events if e.number > since]
        return Response(
            json.dumps({"schema": SCHEMA, "events": found}), media_type="application/json"
        )

    async def healthz(self, request: Request) -> Response:
        is_ok = self._is_alive()
        reason = "the job is being watched" if is_ok else "a thread that watches the job has died"
        return JSONResponse({"ok": is_ok, "reason": reason}, status_code=200 if is_ok else 503)

    async def metrics(self, request: Request) -> Response:
        snapshot = self._publisher.shown.snapshot
        if snapshot is None:
            return PlainTextResponse("no data yet\n", status_code=503)
        try:
            data, content_type = exposition(snapshot)
        except ImportError:
            return PlainTextResponse(
                "prometheus-client is not installed: pip install "
                "'torch-elastic-harness[metrics]'\n",
                status_code=501,
            )
        return Response(data, headers={"Content-Type": content_type})

    def _stream(self, following: Following) -> Response:
        if self._publisher.streams >= MAX_STREAMS:
            return PlainTextResponse(
                f"{MAX_STREAMS} pages are open already\n",
                status_code=503,
                headers={"Retry-After": "10"},
            )
        return StreamingResponse(
            self._publisher.stream(following),
            media_type=_EVENT_STREAM,
            headers={"X-Accel-Buffering": "no"},
        )
