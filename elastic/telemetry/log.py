"""Logs: one line per event on stderr: UTC time, level, node, message.

Standard ``logging`` under the name ``elastic``; a program that configures logging itself keeps
its own handlers (ours is added only where there is none).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass

from elastic.errors import ConfigError
from elastic.messages.environment import identity_in
from elastic.messages.world import WorldIdentity
from elastic.telemetry.printable import printable

LOGGER_NAME = "elastic"
_LONGEST_NAME = 100  # characters; a name may contain anything


@dataclass(eq=False)
class LogOrigin:
    """The node named in a process's log lines if its environment does not name it, as in agents."""

    node: str
    generation: int | None = None

    def __str__(self) -> str:
        known, node = self.generation is not None, printable(self.node, _LONGEST_NAME)
        return f"{node} g{self.generation}" if known else node


_origins: list[LogOrigin] = []


def add_origin(origin: LogOrigin) -> None:
    """Set the origin of this process's lines. If a program launches several nodes at once, only
    lines with an explicit origin, such as a journal's, have one."""
    _origins.append(origin)


def remove_origin(origin: LogOrigin) -> None:
    """Undo :func:`add_origin`. Idempotent."""
    if origin in _origins:
        _origins.remove(origin)


class UtcFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO  [node-a r3 g7 s120] message``."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        where = getattr(record, "origin", None) or _where()
        record.where = f" [{where}]" if where else ""
        return super().format(record)


def _where() -> str:
    if _origins:
        return str(_origins[0]) if len(_origins) == 1 else ""
    rank, world = os.environ.get("RANK"), _world()
    parts = (
        printable(os.environ.get("ELASTIC_NODE_NAME", ""), _LONGEST_NAME),
        f"r{rank}" if rank else None,
        f"g{world.generation}" if world else None,
    )
    return " ".join(part for part in parts if part)


def _world() -> WorldIdentity | None:
    try:
        return identity_in(os.environ)
    except ConfigError:
        return None  # reported by the code that uses the environment


def get_logger() -> logging.Logger:
    """The package's logger, with a handler on stderr unless the program has set up its own."""
    logger = logging.getLogger(LOGGER_NAME)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(UtcFormatter("%(asctime)s %(levelname)-7s%(where)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("ELASTIC_LOG_LEVEL", "INFO").upper())
        logger.propagate = False
    return logger
