"""Texts of others on a terminal: one line each, without control characters, of bounded length."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from elastic.errors import ConfigError
from elastic.telemetry.journal import shorten

_DURATION = re.compile(r"(\d{1,12}(?:\.\d+)?)(s|m|h|d)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def printable(text: str, limit: int = 300) -> str:
    r"""What cannot do anything to a terminal, or to the line that it is part of.

    >>> printable("node\x1b[2J\n")
    'node\\x1b[2J\\n'
    """
    cut = shorten(text, limit)
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


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
    """For people: two units at most.

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


def age(text: str) -> float | None:
    """``90s``, ``10m``, ``2h`` or ``1d`` in seconds; None for anything else.

    >>> age("1.5m"), age("soon")
    (90.0, None)
    """
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def seconds_of(text: str, flag: str) -> float:
    """What a flag says. Raises ConfigError."""
    seconds = age(text)
    if seconds is None:
        raise ConfigError(f"{flag}={printable(text)} is no time", hint=f"for example {flag}=10m")
    return seconds
