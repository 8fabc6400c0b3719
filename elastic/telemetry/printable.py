"""Formats untrusted text and times: one line each, no control characters, bounded length."""

from __future__ import annotations

from datetime import datetime, timezone


def shorten(text: str, limit: int) -> str:
    """Text shortened to about ``limit`` characters, with its original length.

    >>> shorten("abcdefgh", 4)
    'abcd… (8 characters)'
    """
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def printable(text: str, limit: int = 300) -> str:
    r"""Text without control characters, safe for a terminal and for a line of output.

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
