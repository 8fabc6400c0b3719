"""What a node's workers and its agent write to their terminal: the lines, and where they are kept.

``elastic logs`` reads them back. They are in files like a journal's, in the folder of the run in
the user's state folder, and only there: each node's are on its own machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.telemetry.events import Event

# How often a progress bar is a line. It is redrawn ten times a second.
BAR_S = 5.0
_LOG_LINE = re.compile(r"\S+Z [A-Z]+ +\[(\S+?)[ \]]")


@dataclass(frozen=True, kw_only=True)
class Output(Event):
    """Lines of one process of a node."""

    stream: str  # "stdout", "stderr", or "log": the agent's own
    local_rank: int | None  # null: the agent
    rank: int | None  # global, when they were written; null: the agent, or not in a world
    generation: int | None  # null: not in a world
    text: str  # the lines, without the last line break


@dataclass(frozen=True, kw_only=True)
class OutputRedirected(Event):
    """torchrun writes this stream of a worker to a file, which has it instead (``--redirects``)."""

    stream: str
    local_rank: int
    path: str


class OutputLines:
    """Splits a stream of bytes into lines. Of a progress bar, which is written over itself with
    carriage returns, a state is a line every few seconds, and the last one."""

    def __init__(self) -> None:
        self._rest = b""
        self._bar_from_s = -math.inf  # when the next state of a bar becomes a line

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """The lines that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A carriage return at the end may be followed by a line feed.
        end = b"\r" if self._rest.endswith(b"\r") else b""
        *states, current = self._rest.removesuffix(end).split(b"\r")
        self._rest = current + end
        if (bar := _shown(states)) and now_s >= self._bar_from_s:
            self._bar_from_s = now_s + BAR_S
            lines.append(bar)
        return [_shown(line.split(b"\r")).decode(errors="replace") for line in lines]

    def end(self) -> list[str]:
        """The last line, if it is incomplete."""
        return self.feed(b"\n", math.inf) if self._rest else []


def _shown(states: Sequence[bytes]) -> bytes:
    """What a terminal shows of texts that were written over each other."""
    return next((state for state in reversed(states) if state), b"")


def with_origin(origin: str, node: str, line: str) -> str:
    """A line with its origin, unless it is one of the log, which names its node.

    >>> with_origin("local-0", "local-0", "epoch 1")
    '[local-0] epoch 1'
    >>> with_origin("local-0 r1", "local-0", "12:00Z INFO    [local-0 g1] waiting")
    '12:00Z INFO    [local-0 g1] waiting'
    """
    named = _LOG_LINE.match(line)
    return line if named is not None and named[1] == node else f"[{origin}] {line}"
