"""The first and the last event of a process's journal."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.events.base import Event


@dataclass(frozen=True, kw_only=True)
class JournalOpened(Event):
    """A process begins its journal, or continues it in a new file."""

    schema: int  # version of the lines that follow
    role: str  # "agent" or "worker"
    run_id: str | None  # the name of the job; null: unknown
    pid: int  # of the process
    host: str  # the machine's name
    boot_id: str  # of the machine: its processes share a monotonic clock; "": unknown
    library: str  # version of torch-elastic-harness; "": unknown


@dataclass(frozen=True, kw_only=True)
class JournalClosed(Event):
    """The last line of a process that ended normally."""
