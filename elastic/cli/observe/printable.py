"""Durations on a command line, ``90s``, ``10m``, and a console for tables."""

from __future__ import annotations

import re
import sys
from typing import Any

from elastic.errors import ConfigError
from elastic.telemetry.printable import duration, printable, timestamp

__all__ = ["age", "duration", "printable", "seconds_of", "table_console", "timestamp"]

_DURATION = re.compile(r"(\d{1,12}(?:\.\d+)?)(s|m|h|d)")
_PIPE_COLUMNS = 10_000  # wider than any table
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def age(text: str) -> float | None:
    """``90s``, ``10m``, ``2h`` or ``1d`` in seconds; None for anything else.

    >>> age("1.5m"), age("soon")
    (90.0, None)
    """
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def seconds_of(text: str, flag: str) -> float:
    """The value of a flag in seconds. Raises ConfigError."""
    seconds = age(text)
    if seconds is None:
        raise ConfigError(
            f"{flag}={printable(text)} is not a valid duration",
            hint=f"give a number and its unit, s, m, h or d: {flag}=90s",
        )
    return seconds


def table_console() -> Any:
    """A console for tables on stdout. In a pipe, no cell is broken into lines, for grep and awk."""
    from rich.console import Console  # not for -h

    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(width=width, markup=False, highlight=False)
