"""Sockets that hubs listen on."""

from __future__ import annotations

import os
import socket


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A TCP listener at that address; on all, where it is none of this machine's own (NAT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError:
        return socket.create_server(("", port), family=family, backlog=backlog)


def listen_on_path(path: str | os.PathLike[str], *, backlog: int) -> socket.socket:
    """A Unix socket listener."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
