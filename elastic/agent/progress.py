"""Writes the job's progress into the store while this node leads.

On a separate thread: an unreachable store may block a call for seconds, and nothing waits for this
one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from elastic.agent.liveness import ReceivedHeartbeat
from elastic.agent.node import NodeContext
from elastic.errors import CoordinationError
from elastic.membership.progress import (
    MAX_REASON_CHARS,
    MAX_WAITING,
    JobProgress,
    RecordedHeartbeat,
    WaitingNode,
    encode_progress,
)
from elastic.store.keyvalue import Lease
from elastic.telemetry.ledger import ProgressAccount
from elastic.tuning.intervals import (
    PROGRESS_S,
)

# The same if only heartbeats have changed, as in a job without progress.
PROGRESS_IDLE_S = 5.0


class ProgressWriter:
    """One per node. ``lease`` is the node's while it leads, else None; ``checkpoint_step`` and
    ``planned_steps`` are reported by its workers; ``heartbeats`` returns each node's last one,
    ``waiting`` why nodes are not admitted."""

    def __init__(
        self,
        context: NodeContext,
        lease: Callable[[], Lease | None],
        checkpoint_step: Callable[[], int | None] = lambda: None,
        planned_steps: Callable[[], int | None] = lambda: None,
        heartbeats: Callable[[], Mapping[str, ReceivedHeartbeat]] = dict,
        waiting: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._context = context
        self._lease = lease
        self._checkpoint_step = checkpoint_step
        self._planned_steps = planned_steps
        self._heartbeats = heartbeats
        self._waiting = waiting
        self._account = ProgressAccount(context.clock.wall())
        self._written: JobProgress | None = None
        self._written_s = -math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-progress", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop and join. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._context.clock.wait(self._closing, PROGRESS_S):
                self.write()
        except BaseException as error:
            self._context.status.fail(error)
            raise

    def write(self) -> None:
        """Write the record once, if this node leads and something has changed. A failed write is
        not retried: the next one follows."""
        lease, status = self._lease(), self._context.status
        # Also while another node leads: the account continues if this one is elected next.
        progress = self._progress()
        if lease is None:
            self._written = None  # the next leader writes its own record
            return
        now = self._context.clock.monotonic()
        is_news = self._written is None or _facts(progress) != _facts(self._written)
        is_news |= bool(progress.heartbeats) and now - self._written_s >= PROGRESS_IDLE_S
        if status.store_problem or not is_news:
            return
        try:
            self._context.store.put(
                self._context.keys.progress, encode_progress(progress), lease=lease
            )
        except CoordinationError:
            return
        self._written, self._written_s = progress, now

    def _progress(self) -> JobProgress:
        step_rate, now_s = self._context.status.step_rate, self._context.clock.wall()
        account = self._account
        step = step_rate.step if step_rate is not None else None
        step_time_s = round(step_rate.step_time_s, 6) if step_rate is not None else 0.0
        account.note(now_s, step, step_time_s, self._checkpoint_step())
        goodput = account.goodput(now_s)
        return JobProgress(
            node_id=self._context.status.node.node_id,
            generation=step_rate.generation if step_rate is not None else 0,
            step=step,
            step_time_s=step_time_s,
            checkpoint_step=account.checkpoint_step,
            time_s=now_s,
            checkpoint_at_s=account.checkpoint_at_s,
            planned_steps=self._planned_steps(),
            goodput=round(goodput, 4) if goodput is not None else None,
            goodput_since_s=account.start_s if goodput is not None else None,
            heartbeats=self._recorded_heartbeats(now_s),
            waiting=tuple(
                WaitingNode(node_id=node_id, reason=reason[:MAX_REASON_CHARS])
                for node_id, reason in sorted(self._waiting().items())[:MAX_WAITING]
            ),
        )

    def _recorded_heartbeats(self, now_s: float) -> tuple[RecordedHeartbeat, ...]:
        now = self._context.clock.monotonic()
        return tuple(
            RecordedHeartbeat(
                node_id=node_id,
                generation=last.heartbeat.generation,
                step=last.heartbeat.step,
                has_joined=last.heartbeat.has_joined,
                heard_at_s=round(now_s - (now - last.at_s), 1),
            )
            for node_id, last in sorted(self._heartbeats().items())
        )


def _facts(progress: JobProgress) -> JobProgress:
    """The record without constantly changing values, so that a job without progress writes only
    heartbeats, and less often. The first step of a node is a change."""
    heard = tuple(replace(last, step=None, heard_at_s=0.0) for last in progress.heartbeats)
    return replace(progress, time_s=0.0, goodput=None, goodput_since_s=None, heartbeats=heard)
