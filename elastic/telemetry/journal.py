"""The journal: every event as a JSON line in a file of its own per process, and as a log line.

With ``ELASTIC_JOURNAL=folder`` each process appends to ``folder/<node>-<pid>.jsonl``. One line
is one ``write`` on a file opened for appending: a reader never sees half a line that will not
be completed, except the last one of a killed process.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import Event, WorldEntered
from elastic.telemetry.log import LogOrigin, get_logger

_CAMEL = re.compile(r"(?<!^)(?=[A-Z])")


class EventSink(Protocol):
    """Takes events. Never raises: telemetry must not stop training."""

    def emit(self, event: Event, *, level: int = logging.INFO) -> None: ...


def kebab_name(event: Event) -> str:
    """``WorldFormed`` → ``world-formed``."""
    return _CAMEL.sub("-", type(event).__name__).lower()


class Journal:
    """Writes events to the log and, if a folder is given, to a file.

    ``origin``: which node its log lines name, in a process whose environment does not say so.
    """

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None,
        identity: Mapping[str, Any],
        clock: Clock = SYSTEM_CLOCK,
        origin: LogOrigin | None = None,
    ) -> None:
        self._identity = dict(identity)
        self._origin = origin
        self._clock = clock
        self._log = get_logger()
        self._fd = self._open(folder) if folder else None

    def _open(self, folder: str | os.PathLike[str]) -> int | None:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", str(self._identity.get("node", "process")))
        path = Path(folder) / f"{name}-{os.getpid()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._log.warning("no journal: %s cannot be written (%s)", path, error)
            return None

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        """Log and append one event."""
        data = asdict(event)
        said = " ".join(f"{k}={v!r}" for k, v in data.items() if v is not None)
        origin = self._origin
        if origin is not None and isinstance(event, WorldEntered):
            origin.generation = event.generation
        extra = {"origin": str(origin)} if origin is not None else None
        self._log.log(level, "%s %s", kebab_name(event), said, extra=extra)
        if self._fd is None:
            return
        line = {
            "event": kebab_name(event),
            "time": self._clock.wall(),
            "monotonic": self._clock.monotonic(),
            **self._identity,
            **data,
        }
        try:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
        except OSError as error:
            self._log.warning("journal: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file. Later events only reach the log."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
