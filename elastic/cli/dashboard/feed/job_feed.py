"""Watches a job on behalf of all clients of the page.

One thread reads etcd, one the journals, and one draws the charts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from elastic.cli.dashboard.feed.event_log import EventLog
from elastic.cli.dashboard.feed.journal_feed import JournalFeed
from elastic.cli.dashboard.feed.snapshot import JobSnapshot, Outage
from elastic.cli.observe.job_view import JobView, read_job
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import CoordinationError
from elastic.membership.keys import Keys
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_intervals import (
    DASHBOARD_DRAIN_S,
    DASHBOARD_ETCD_S,
    DASHBOARD_JOURNALS_S,
    DASHBOARD_RECONNECT_S,
)

OpenStore = Callable[[], AbstractContextManager[KeyValue]]


class JobFeed:
    """Watches from ``start`` to ``close``. ``on_change`` gets every snapshot, on one thread
    at a time; ``on_error`` gets the exception that ended a thread.

    ``open_store``: connects to etcd, or None to read journals only. ``journals``: None if there are
    none.
    """

    def __init__(
        self,
        keys: Keys | None,
        open_store: OpenStore | None,
        journals: JournalFeed | None,
        log: EventLog,
        *,
        on_change: Callable[[JobSnapshot], object],
        on_error: Callable[[BaseException], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._keys = keys
        self._open_store = open_store
        self._journals = journals
        self._log = log
        self._on_change = on_change
        self._on_error = on_error
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        run_id = keys.run_id if keys is not None else ""
        self._snapshot = JobSnapshot(
            run_id=run_id,
            at_s=clock.wall(),
            uses_etcd=open_store is not None,
            reads_journals=journals is not None,
        )
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            for loop, name, is_used in (
                (self._watch_etcd, "elastic-dashboard-etcd", open_store is not None),
                (self._watch_journals, "elastic-dashboard-journals", journals is not None),
                (self._watch_charts, "elastic-dashboard-charts", journals is not None),
            )
            if is_used
        ]

    @property
    def snapshot(self) -> JobSnapshot:
        """The newest snapshot."""
        with self._lock:
            return self._snapshot

    @property
    def is_alive(self) -> bool:
        """Whether all threads are running."""
        return all(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start watching."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and wait for the threads for at most ``DASHBOARD_DRAIN_S``. Idempotent.

        Drawing, and connecting to an etcd that does not answer, take longer than a user who
        presses Ctrl-C waits. The threads are daemons.
        """
        self._closing.set()
        deadline_s = self._clock.monotonic() + DASHBOARD_DRAIN_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - self._clock.monotonic()))

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            get_logger().exception("a thread of the dashboard died")
            self._on_error(error)
            raise

    def _publish(self, **changes: object) -> None:
        if self._closing.is_set():  # a thread that close() did not wait for
            return
        with self._lock:
            self._snapshot = replace(self._snapshot, at_s=self._clock.wall(), **changes)  # type: ignore[arg-type]
            self._on_change(self._snapshot)

    # -- etcd ---------------------------------------------------------------------------------

    def _watch_etcd(self) -> None:
        assert self._open_store is not None
        while not self._closing.is_set():
            try:
                with self._open_store() as store:
                    self._poll(store)
            except CoordinationError as error:
                self._note_outage(error)
            self._clock.wait(self._closing, DASHBOARD_RECONNECT_S)

    def _poll(self, store: KeyValue) -> None:
        """Poll until closed, whether etcd answers or not: the store reconnects by itself."""
        while not self._closing.is_set():
            try:
                self._take(self._read(store))
            except CoordinationError as error:
                self._note_outage(error)
            self._clock.wait(self._closing, DASHBOARD_ETCD_S)

    def _read(self, store: KeyValue) -> JobView:
        assert self._keys is not None
        return read_job(store, self._keys, self._clock.wall())

    def _take(self, view: JobView) -> None:
        changes: dict[str, object] = {"view": view, "outage": None, "last_known": ()}
        if self._journals is None:  # journals have more detail
            self._log.add_changes(view)
            changes["events"] = self._log.events
        self._publish(**changes)

    def _note_outage(self, error: CoordinationError) -> None:
        before = self.snapshot
        since_s = before.outage.since_s if before.outage is not None else self._clock.wall()
        known = before.last_known
        if self._journals is not None:
            known = self._journals.last_known(self._clock.wall())
        if before.view is not None:  # it has nodes and incidents; the journals have a newer step
            known = known[:1]
        self._publish(outage=Outage(since_s, str(error.message)), last_known=known)

    # -- journals -----------------------------------------------------------------------------

    def _watch_journals(self) -> None:
        assert self._journals is not None
        while not self._closing.is_set():
            if self._journals.look():
                self._publish(
                    run_id=self.snapshot.run_id or self._journals.run_id,
                    events=self._log.events,
                    notes=self._journals.notes,
                )
            self._clock.wait(self._closing, DASHBOARD_JOURNALS_S)

    def _watch_charts(self) -> None:
        """Draw on a separate thread: drawing takes longer than an event may wait."""
        assert self._journals is not None
        while not self._closing.is_set():
            if self._journals.draw_if_due():
                self._publish(charts=self._journals.charts)
            self._clock.wait(self._closing, DASHBOARD_JOURNALS_S)
