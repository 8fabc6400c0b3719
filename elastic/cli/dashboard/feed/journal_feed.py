"""Follows the journals of a job: events immediately, charts when they are due."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from elastic.cli.dashboard.feed.charts import charts_of
from elastic.cli.dashboard.feed.event_log import EventLog
from elastic.cli.dashboard.feed.snapshot import RunCharts
from elastic.cli.observe.last_known import last_known
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.telemetry.journal_reader import JournalFolder, JournalRecord
from elastic.telemetry.merging import UNNAMED_RUNS
from elastic.tuning.agent_intervals import DASHBOARD_CHARTS_S

_MAX_NOTES = 10
# A chart is redrawn immediately after these events.
_URGENT = frozenset({"world-formed", "recovered", "job-ended"})
_DRAWING_INTERVALS = 10  # wait ten times as long as drawing takes: at most 1/10 of a core

Draw = Callable[[list[JournalRecord], list[str], "str | None"], RunCharts]


class JournalFeed:
    """Follows one folder. One thread calls ``look``, one ``draw_if_due``; the rest is thread-safe.

    ``run_id``: "" selects the run that began last.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        log: EventLog,
        *,
        clock: Clock = SYSTEM_CLOCK,
        draw: Draw = charts_of,
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._log = log
        self._clock = clock
        self._draw = draw
        self._reader = JournalFolder(folder)
        self._lock = threading.Lock()
        self._records: list[JournalRecord] = []
        self._notes: list[str] = []
        self._runs: dict[str, str] = {}  # by writer
        self._is_urgent = False
        self._drawn_records = 0
        self._due_s = float("-inf")
        self.charts: RunCharts | None = None

    @property
    def run_id(self) -> str:
        """The requested run, or the run of the journal opened last."""
        named = [run for run in self._runs.values() if run not in UNNAMED_RUNS]
        return self._run_id or (named[-1] if named else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on files that could not be read."""
        with self._lock:
            return tuple(self._notes[:_MAX_NOTES])

    def last_known(self, now_s: float) -> list[str]:
        """The last known state according to the journals, as lines of text."""
        return last_known(str(self._folder), self._run_id, now_s)

    def look(self) -> bool:
        """Read new events; returns whether there were any."""
        found = self._reader.read_new()
        for record in found:
            if record.name == "journal-opened":
                self._runs[record.writer] = record.text("run_id")
        own = [r for r in found if self._runs.get(r.writer, "") in (*UNNAMED_RUNS, self.run_id)]
        self._log.add_records(own)
        notes = self._reader.notes(is_growing=True)
        with self._lock:
            is_news = bool(own) or notes != self._notes
            self._notes = notes
            self._records += own
            self._is_urgent |= any(record.name in _URGENT for record in own)
        return is_news

    def draw_if_due(self) -> bool:
        """Redraw the charts if there are new events for them; returns whether it did."""
        now_s = self._clock.monotonic()
        with self._lock:
            is_news = len(self._records) > self._drawn_records
            if not is_news or (now_s < self._due_s and not self._is_urgent):
                return False
            records, notes = list(self._records), list(self._notes)
            self._is_urgent = False
        self.charts = self._draw(records, notes, self.run_id or None)
        self._drawn_records = len(records)
        took_s = self._clock.monotonic() - now_s
        self._due_s = self._clock.monotonic() + max(DASHBOARD_CHARTS_S, _DRAWING_INTERVALS * took_s)
        return True
