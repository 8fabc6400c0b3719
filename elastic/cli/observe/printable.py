"""Durations on a command line: ``90s``, ``10m``."""

from __future__ import annotations

import re

from elastic.errors import ConfigError
from elastic.telemetry.printable import duration, printable, timestamp

__all__ = ["age", "duration", "printable", "seconds_of", "timestamp"]

_DURATION = re.compile(r"(\d{1,12}(?:\.\d+)?)(s|m|h|d)")
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
            f"{flag}={printable(text)} is not a valid duration", hint=f"for example {flag}=10m"
        )
    return seconds
