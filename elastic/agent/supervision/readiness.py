"""Workers that are not ready yet: what each one waits for, and the time limit of a meeting.

Runs on the node's thread. The ranks of a replica meet once all of them are in elastic.join(), which
takes milliseconds. If they do not meet, for any reason, they are ended, and replaced or restarted
like any dead worker: otherwise they, and with them all other ranks of the job, would wait for the
timeout of a collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal

from elastic.agent.supervision.known_workers import KnownWorkers
from elastic.events import WorkersNotReady
from elastic.link.server import LinkServer, Worker
from elastic.membership.records import NodeState
from elastic.node.context import NodeContext
from elastic.tuning.agent_intervals import MAX_COUNTED_S, NOT_READY_S


class Readiness:
    """One per agent, across all starts of its workers."""

    def __init__(self, context: NodeContext, known: KnownWorkers, server: LinkServer) -> None:
        self._at = context
        self._known = known
        self._server = server
        self._checked_s = context.clock.monotonic()
        self._waited_s = 0.0  # while some workers are ready and others are not
        self._reports_at_s = NOT_READY_S

    def check(self) -> None:
        """Called on every iteration of the node's thread.

        A longer pause between two calls, of an agent that was frozen with its workers, is counted
        as a short one.
        """
        now_s = self._at.clock.monotonic()
        passed_s = min(now_s - self._checked_s, MAX_COUNTED_S)
        self._checked_s = now_s
        self._end_meetings(passed_s)
        self._report(passed_s)

    def _end_meetings(self, passed_s: float) -> None:
        left_s = self._known.meeting_left_s
        for pid in left_s:
            left_s[pid] -= passed_s
        present = {worker.pid: worker for worker in self._server.workers()}
        late = [pid for pid, remaining_s in left_s.items() if remaining_s <= 0]
        for pid in late:
            del left_s[pid]
            if (worker := present.get(pid)) is not None:
                self._end(worker)

    def _end(self, worker: Worker) -> None:
        others = self._known.replicas.siblings(worker.pid)
        self._known.hung[worker.pid] = (
            f"{_name(worker)} has not met the other ranks of its replica "
            f"({', '.join(map(_name, others))}) in time"
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    def _report(self, passed_s: float) -> None:
        """Report the workers for which ready ones wait."""
        node, known = self._at.status.node, self._known
        is_waiting = node.state is NodeState.STARTING and bool(known.ready & known.present)
        if not is_waiting:
            self._waited_s, self._reports_at_s = 0.0, NOT_READY_S
            return
        self._waited_s += passed_s
        if self._waited_s < self._reports_at_s:
            return
        self._reports_at_s = 2 * self._waited_s
        here = {
            worker.local_rank: worker
            for worker in self._server.workers()
            if worker.pid not in known.ended
        }
        waits = (
            self._wait_of(local_rank, here.get(local_rank)) for local_rank in range(node.nproc)
        )
        self._at.journal.emit(
            WorkersNotReady(
                waited_s=round(self._waited_s, 1), reason="; ".join(filter(None, waits))
            ),
            level=logging.WARNING,
        )

    def _wait_of(self, local_rank: int, worker: Worker | None) -> str:
        """What the worker has not done yet; empty if it is ready."""
        if worker is None:
            return f"local rank {local_rank} has not called elastic.join()"
        pid, known = worker.pid, self._known
        if pid in known.ready:
            return ""
        if pid in known.meeting_left_s:
            return f"{_name(worker)} is meeting the other ranks of its replica"
        if known.replicas.has_joined(pid) and pid not in known.met:
            return f"{_name(worker)} waits for the other ranks of its replica"
        return f"{_name(worker)} has not called run.retry()"


def _name(worker: Worker) -> str:
    return f"local rank {worker.local_rank} (pid {worker.pid})"
