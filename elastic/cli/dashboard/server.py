"""Serves the page with uvicorn until a signal, or until the job feed fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from elastic.cli.dashboard.publisher import Publisher
from elastic.errors import ConfigError
from elastic.tuning.agent_intervals import DASHBOARD_DRAIN_S, DASHBOARD_PING_S

_BACKLOG = 512


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
