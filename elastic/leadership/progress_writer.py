"""Writes how far the job is into the store, while this node leads.

On a thread of its own: a store that is away may keep a call waiting for seconds, and nothing waits
for this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from elastic.errors import CoordinationError
from elastic.membership.job_progress import JobProgress, encode_progress
from elastic.node.context import NodeContext
from elastic.store.keyvalue import Lease
from elastic.tuning.agent_intervals import PROGRESS_S


class ProgressWriter:
    """One per node. ``lease`` is the node's while it leads, else None; ``checkpoint_step`` what its
    workers know of checkpoints."""

    def __init__(
        self,
        context: NodeContext,
        lease: Callable[[], Lease | None],
        checkpoint_step: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._at = context
        self._lease = lease
        self._checkpoint_step = checkpoint_step
        self._written: JobProgress | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-progress", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Stop and join. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._at.clock.wait(self._closing, PROGRESS_S):
                self.write()
        except BaseException as error:
            self._at.status.fail(error)
            raise

    def write(self) -> None:
        """Once, if this node leads and there is news. A store in trouble is left alone: the next
        time will do."""
        lease, status = self._lease(), self._at.status
        if lease is None:
            self._written = None  # the next leader's record is not ours
            return
        progress = self._progress()
        is_news = self._written is None or progress != replace(
            self._written, time_s=progress.time_s
        )
        if status.store_problem or not is_news:
            return
        try:
            self._at.store.put(self._at.keys.progress, encode_progress(progress), lease=lease)
        except CoordinationError:
            return
        self._written = progress

    def _progress(self) -> JobProgress:
        step_rate = self._at.status.step_rate
        return JobProgress(
            node_id=self._at.status.node.node_id,
            generation=step_rate.generation if step_rate is not None else 0,
            step=step_rate.step if step_rate is not None else None,
            step_time_s=round(step_rate.step_time_s, 6) if step_rate is not None else 0.0,
            checkpoint_step=self._checkpoint_step(),
            time_s=self._at.clock.wall(),
        )
