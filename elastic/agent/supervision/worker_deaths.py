"""The consequence of a worker's end: a failure of its node, or a replacement.

Runs on the node's thread. The other nodes are notified at once, before torchrun detects the death.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass, replace

from elastic.agent.messages import ReplacementEnded, publish_change
from elastic.agent.supervision.announced_worlds import AnnouncedWorlds
from elastic.agent.supervision.known_workers import KnownWorkers
from elastic.events import Waiting, WorkerDied
from elastic.failures.verdict import HANG
from elastic.link.protocol import Exiting
from elastic.link.server import Worker, WorkerDeath
from elastic.membership.records import NodeState
from elastic.node.context import NodeContext
from elastic.node.oom_kills import OOM_KILL, OomKillCounter
from elastic.node.orphan_reaper import kill_group

HUNG_EXIT_CODE = 1
_KILLED_DATA_WORKER = re.compile(r"DataLoader worker .*killed by signal: Killed")


@dataclass(frozen=True)
class WorkerFailed:
    """A worker's failure, as written to the node's record."""

    text: str
    exit_code: int
    is_oom_kill: bool
    kernel_log: tuple[str, ...]


# This many replacements per worker of a node may die before all workers are ready. After that,
# torchrun restarts all workers and counts the restart: workers that the kernel kills at each start
# are not replaced endlessly.
MAX_REPLACED_STARTS = 3


class WorkerDeaths:
    """One per agent, across all starts of its workers."""

    def __init__(
        self,
        context: NodeContext,
        known: KnownWorkers,
        announced: AnnouncedWorlds,
        oom_kills: OomKillCounter,
    ) -> None:
        self._at = context
        self._known = known
        self._announced = announced
        self._oom_kills = oom_kills

    def on_exit_notice(self, worker: Worker, notice: Exiting) -> None:
        """A worker is about to end with an error: exclude its node now. Until its process has
        ended, which may take seconds, peers would wait for it in the next world."""
        known, status = self._known, self._at.status
        is_leaving = self._announced.have_to_leave or status.node.state is NodeState.LEAVING
        is_trained_with = status.node.state in (NodeState.READY, NodeState.STARTING)
        if notice.clean or is_leaving or status.stopping or not is_trained_with:
            return
        if worker.pid not in known.ready or known.starts.get(worker.pid) != status.starts:
            return  # torchrun restarts it: the others have not trained with it in process
        siblings = known.replicas.siblings(worker.pid)
        known.end(worker)
        known.failed.add(worker.pid)
        kernel_log = self._at.kernel_log.excerpt()
        # The kernel prefers the process with most memory: of a data loader's, or the worker.
        is_killed = _KILLED_DATA_WORKER.search(notice.error) is not None
        is_oom_kill = is_killed and self._oom_kills.has_killed()
        text = f"{notice.error}: {OOM_KILL}" if is_oom_kill else notice.error
        status.failure_step = notice.step
        self._emit_died(worker, text, str(kernel_log))
        failure = WorkerFailed(text, notice.exit_code, is_oom_kill, kernel_log.lines)
        self._publish_failure(worker, siblings, failure)

    def _emit_died(self, worker: Worker, reason: str, kernel_log: str = "") -> None:
        pid, local_rank = worker.pid, worker.local_rank
        self._at.journal.emit(
            WorkerDied(pid=pid, local_rank=local_rank, reason=reason, kernel_log=kernel_log)
        )

    def on_ended(self, worker: Worker, death: WorkerDeath) -> None:
        """A process has ended: notify the other nodes before torchrun detects it."""
        known, status = self._known, self._at.status
        was_ready = worker.pid in known.ready
        is_reported = worker.pid in known.failed
        hung = known.hung.get(worker.pid)
        hung = hung and f"{HANG}{hung}"
        start = known.starts.get(worker.pid, status.starts)
        siblings = known.replicas.siblings(worker.pid)
        known.drop(worker)
        if self._announced.have_to_leave or status.node.state is NodeState.LEAVING:
            if known.have_left:
                status.note_workers_left()
            return
        if status.stopping or start != status.starts:
            return  # torchrun ends them, or has ended them, to restart them in another world
        if worker.pid in status.to_replace or is_reported:
            # It has announced its failure, or was ended with another rank of its replica.
            kill_group(worker.pid)
            return
        notice = death.exit_notice
        is_unknown = death.exit_code is None and death.signal is None
        if death.exit_code == 0 or (is_unknown and notice is not None and notice.clean):
            return
        kill_group(worker.pid)
        is_failure = status.node.state in (NodeState.READY, NodeState.STARTING) and (
            was_ready or self._was_replacing(worker, death, siblings)
        )
        is_killed = death.signal == signal.SIGKILL and hung is None
        kernel_log = self._at.kernel_log.excerpt()
        # Evaluated once per failure: the counter only includes earlier ones.
        is_oom_kill = (
            is_failure
            and is_killed
            and (self._oom_kills.has_killed() or kernel_log.has_killed(worker.pid))
        )
        text = hung or (
            notice.error if notice is not None and notice.error else describe_death(worker, death)
        )
        if is_oom_kill:
            text = f"{text}: {OOM_KILL}"
        status.failure_step = notice.step if notice is not None else None
        self._emit_died(worker, text, str(kernel_log))
        # Otherwise torchrun restarts it: the others have not trained with it in process.
        if is_failure:
            # A worker that this agent ended was not killed from outside: it failed by itself.
            exit_code = exit_code_of(death) if hung is None else HUNG_EXIT_CODE
            failure = WorkerFailed(text, exit_code, is_oom_kill, kernel_log.lines)
            self._publish_failure(worker, siblings, failure)

    def on_unkillable(self, pid: int, reason: str) -> None:
        """A killed worker is blocked in the kernel."""
        hung = self._known.hung.get(pid, f"a worker (pid {pid}) was ended by SIGKILL")
        publish_unkillable(self._at, f"{hung}; {reason}", self._announced.last_generation)

    def on_ended_unconnected(self, ended: ReplacementEnded) -> None:
        """Replace a replacement that was killed before it had connected to the link."""
        signum = -ended.exit_code if ended.exit_code < 0 else None
        worker = Worker(ended.pid, ended.local_rank, token=0)
        death = WorkerDeath(ended.pid, ended.exit_code if signum is None else None, signum, None)
        kill_group(ended.pid)
        if self._at.status.stopping or not self._was_replacing(worker, death, ()):
            return
        self._at.status.to_replace.add(ended.pid)
        self._emit_died(worker, describe_death(worker, death))

    def _publish_failure(
        self,
        worker: Worker,
        siblings: tuple[Worker, ...],
        failure: WorkerFailed,
    ) -> None:
        """Publish the failure in the node's record."""
        status, generation = self._at.status, self._announced.last_generation
        is_replaced = self._can_be_replaced({worker.pid, *(w.pid for w in siblings)})
        if is_replaced:  # before the state: the main thread reads both
            self._announced.newest = None
            status.to_replace.add(worker.pid)
            self._end_replica(worker, siblings)
        publish_change(
            self._at,
            lambda n: replace(
                n,
                state=NodeState.STARTING if is_replaced else NodeState.ARRIVED,
                in_process=False,
                running=None,
                replica_start="",
                replica=(),
                arrived_for=generation,
                failure=failure.text,
                failure_exit_code=failure.exit_code,
                failure_step=status.failure_step,
                failure_generation=n.last_run,
                failure_is_oom_kill=failure.is_oom_kill,
                failure_kernel_log=failure.kernel_log,
            ),
        )

    def _can_be_replaced(self, replica: set[int]) -> bool:
        """Whether other workers can wait with their state for replacements of these."""
        status, known = self._at.status, self._known
        return (
            status.can_replace
            and (status.node.in_process or bool(status.to_replace))
            and bool((known.present - replica) & known.ready)
            and not known.left
        )

    def _was_replacing(
        self, worker: Worker, death: WorkerDeath, siblings: tuple[Worker, ...]
    ) -> bool:
        """Whether the replacement of a dead worker was killed before it was ready, and can be
        replaced again. A replacement that exits would fail again: torchrun restarts all."""
        status = self._at.status
        if death.signal in (None, signal.SIGTERM) or not status.to_replace:
            return False
        is_rare = len(status.to_replace) < MAX_REPLACED_STARTS * status.node.nproc
        return is_rare and self._can_be_replaced({worker.pid, *(w.pid for w in siblings)})

    def _end_replica(self, dead: Worker, siblings: tuple[Worker, ...]) -> None:
        """End the other ranks of the replica: they can neither train nor provide a complete state,
        so all its processes are replaced."""
        for worker in siblings:
            reason = f"ended because local rank {dead.local_rank} of the same replica ended"
            self._emit_died(worker, reason)
            # Its death may be reported after the first replacement has joined, which must not meet
            # the dead rank.
            self._known.end(worker)
            self._at.status.to_replace.add(worker.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def publish_unkillable(context: NodeContext, failure: str, generation: int) -> None:
    """Publish that this node has failed although a killed worker still exists, blocked in the
    kernel: it makes no more progress, but its end, for which torchrun waits, may never come.

    The state excludes the node from worlds, also from those that restart all workers. Once the
    process has ended, torchrun restarts the workers, and the node arrives again.
    """
    status = context.status
    if status.node.state in (NodeState.FAILED, NodeState.FINISHED):
        return
    publish_change(
        context,
        lambda n: replace(
            n,
            state=NodeState.FAILED,
            in_process=False,
            running=None,
            replica_start="",
            replica=(),
            arrived_for=generation,
            failure=f"{HANG}{failure}",
            failure_exit_code=HUNG_EXIT_CODE,
            failure_generation=n.last_run,
        ),
    )
    context.journal.emit(Waiting(reason=f"{status.node.name} waits: {failure}"))


def describe_death(worker: Worker, death: WorkerDeath) -> str:
    """Which process ended, and how."""
    who = f"local rank {worker.local_rank} (pid {worker.pid})"
    if death.signal is not None:
        return f"{who} was ended by {signal.Signals(death.signal).name}"
    if death.exit_code is not None:
        return f"{who} ended with exit code {death.exit_code}"
    return f"{who} disappeared"


def exit_code_of(death: WorkerDeath) -> int:
    """The exit code; negative for a signal, as in torch."""
    if death.signal is not None:
        return -death.signal
    return death.exit_code if death.exit_code is not None else 1
