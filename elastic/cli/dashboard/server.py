"""Serves the page with uvicorn until a signal, or until the job feed fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic.cli.dashboard.publisher import Publisher
from elastic.errors import ConfigError
from elastic.tuning.agent_intervals import DASHBOARD_DRAIN_S, DASHBOARD_PING_S, DASHBOARD_REQUEST_S

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


class DashboardServer(uvicorn.Server):
    """A server that closes its streams on shutdown: connected clients would keep it alive."""

    def __init__(self, app: ASGIApp, publisher: Publisher) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,  # URLs may contain the token
                lifespan="off",
                server_header=False,
                ws="none",
                http=LimitedConnection,
                timeout_keep_alive=int(DASHBOARD_PING_S),
                timeout_graceful_shutdown=int(DASHBOARD_DRAIN_S),
            )
        )
        self._publisher = publisher

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._publisher.attach()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._publisher.close()
        await super().shutdown(sockets)

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until a signal ends it."""
        asyncio.run(self.serve(sockets=[listener]))


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
