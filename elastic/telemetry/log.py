"""Log lines of agents and workers, with their origin."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TextIO

from elastic.errors import ConfigError
from elastic.wire.messages import WorldIdentity, identity_in

# ----------------------------------------------------------------------------
# Formats untrusted text and times: one line each, no control characters, bounded length.


_NARROWEST = 40  # columns of a terminal in which rows are wrapped


def shorten(text: str, limit: int) -> str:
    """Text shortened to about ``limit`` characters, with its original length.

    >>> shorten("abcdefgh", 4)
    'abcd… (8 characters)'
    """
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str, limit: int = 300) -> str:
    r"""Text without control characters, safe for a terminal and for a line of output.

    >>> printable("node\x1b[2J\n")
    'node\\x1b[2J\\n'
    """
    cut = shorten(text, limit)
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def wrapped(line: str, stream: TextIO) -> str:
    """The line as it is written to ``stream``: on a terminal, in rows that are indented from the
    second one on; elsewhere, for grep and awk, in one."""
    if not stream.isatty():
        return line
    columns = shutil.get_terminal_size().columns
    if len(line) <= columns or columns < _NARROWEST:
        return line
    return textwrap.fill(
        line,
        columns,
        subsequent_indent="    ",
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def timestamp(time_s: float) -> str:
    """UTC, in milliseconds.

    >>> timestamp(1769860800.1234)
    '2026-01-31T12:00:00.123Z'
    """
    try:
        at = datetime.fromtimestamp(time_s, timezone.utc)
    except (OverflowError, OSError, ValueError):
        return f"{time_s:.3f}"
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def duration(seconds: float) -> str:
    """A duration in at most two units.

    >>> [duration(s) for s in (0.0421, 7.25, 75, 3700, 200000)]
    ['42 ms', '7.2 s', '1 min 15 s', '1 h 1 min', '2 d 7 h']
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


# ----------------------------------------------------------------------------
# Logs: one line per event on stderr: UTC time, level, node, message.
#
# Standard ``logging`` under the name ``elastic``; a program that configures logging itself keeps
# its own handlers (ours is added only where there is none).

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


class _Handler(logging.StreamHandler[TextIO]):
    """Wraps the lines of an agent on a terminal; those of its workers are kept as they are."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        is_plain = "\n" in line or "RANK" in os.environ
        return line if is_plain else wrapped(line, self.stream)


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
        handler = _Handler(sys.stderr)
        handler.setFormatter(UtcFormatter("%(asctime)s %(levelname)-7s%(where)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("ELASTIC_LOG_LEVEL", "INFO").upper())
        logger.propagate = False
    return logger
