"""Replaces a single dead worker: its siblings keep their processes and their state.

torchrun supervises the workers of a node as one: it polls their processes, and if one has failed,
it ends all others and restarts them. So each process is replaced by an object with the same
interface that starts another process when torch polls it and it is dead: torch detects no failure.
The node's thread decides when (:mod:`elastic.agent.supervision.workers`): in in-process mode only,
and as long as one worker of the node has the state. The new process warms up like those of a
joining node, and receives its world over the link.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import WorkerReplaced
from elastic.messages.environment import CALL_JOIN, world_variables
from elastic.messages.world import NO_WORLD, RankAssignment
from elastic.rendezvous import torch_private
from elastic.rendezvous.torch_private import SupervisedWorker, Supervision
from elastic.telemetry.journal import EventSink
from elastic.tuning.agent_intervals import REPLACEMENT_DECIDED_S


class ReplacingNode(Protocol):
    """The interface of the node's service."""

    @property
    def is_replacing(self) -> bool: ...

    def allow_replacement(self, is_allowed: bool) -> None: ...

    def is_to_be_replaced(self, pid: int) -> bool | None: ...

    def replacement_started(self, pid: int) -> None: ...

    def replacement_ended(self, pid: int, local_rank: int, exit_code: int) -> None: ...


class Replacement:
    """One per agent; on torchrun's main thread."""

    def __init__(
        self,
        node: ReplacingNode,
        journal: EventSink,
        around_start: Callable[[], AbstractContextManager[object]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._node = node
        self._around_start = around_start  # os.environ is that of the workers within it
        self._journal = journal
        self._clock = clock
        self._supervision: Supervision | None = None
        self._is_counted = False  # as a restart: once for all that die together
        self._has_given_up = False  # torch has seen a failure, and ends all workers

    def look(self, supervision: Supervision | None) -> None:
        """Called with every poll of torchrun's, while all workers are well."""
        self._supervision = supervision
        if supervision is None:
            self._node.allow_replacement(False)
            return
        self._has_given_up = False
        self._is_counted = self._is_counted and self._node.is_replacing
        for worker in supervision.workers:
            if not isinstance(worker.process, ReplaceableProcess):
                worker.supervise(ReplaceableProcess(worker, self._decide, self._start, self._clock))
        self._node.allow_replacement(supervision.restarts_left > 0)

    def _decide(self, pid: int, local_rank: int, exit_code: int, waited_s: float) -> bool | None:
        """Whether a dead worker is to be replaced; None: that is not decided yet."""
        if self._has_given_up:
            return False
        if not waited_s:
            self._node.replacement_ended(pid, local_rank, exit_code)
        decision = self._node.is_to_be_replaced(pid)
        if decision is None and waited_s < REPLACEMENT_DECIDED_S:
            return None
        if not decision:
            self._has_given_up = True
            self._node.allow_replacement(False)
            self._count(False)  # torch counts its own restart
        return bool(decision)

    def _count(self, is_counted: bool) -> None:
        assert self._supervision is not None
        self._supervision.count_restarts(int(is_counted) - int(self._is_counted))
        self._is_counted = is_counted

    def _start(self, worker: SupervisedWorker) -> subprocess.Popen[bytes]:
        assert self._supervision is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(worker.error_file)  # the dead one's
        with self._around_start():
            process = subprocess.Popen(
                worker.process.args,
                env={**os.environ, **worker.environment, **_without_a_world(worker)},
                stdout=worker.stdout,
                stderr=worker.stderr,
                start_new_session=True,
            )
        self._node.replacement_started(process.pid)
        self._supervision.replaced(worker.local_rank, process.pid)
        self._count(True)
        self._journal.emit(WorkerReplaced(local_rank=worker.local_rank, pid=process.pid))
        return process


def _without_a_world(worker: SupervisedWorker) -> Mapping[str, str]:
    """As for the workers of a joining node: their real ranks come over the link."""
    size = int(worker.environment["LOCAL_WORLD_SIZE"])
    return world_variables(
        NO_WORLD,
        RankAssignment(
            rank=worker.local_rank, size=size, local_rank=worker.local_rank, local_size=size
        ),
        node_rank=0,
        nodes=1,
        store_host="localhost",
        store_port=CALL_JOIN,
    )


class ReplaceableProcess:
    """A worker's present process, as torch polls it."""

    def __init__(
        self,
        worker: SupervisedWorker,
        decide: Callable[[int, int, int, float], bool | None],
        start: Callable[[SupervisedWorker], subprocess.Popen[bytes]],
        clock: Clock,
    ) -> None:
        self._worker = worker
        self._process = worker.process
        self._decide = decide
        self._start = start
        self._clock = clock
        self._seen_dead_s: float | None = None
        self._has_failed = False  # torch knows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def poll(self) -> int | None:
        """The exit code; None while it runs, and where it is (to be) replaced."""
        code = self._look()
        is_failure = code not in (None, 0) and not self._has_failed
        # (Otherwise all are being ended.)
        if is_failure and torch_private.is_looking_for_failures(sys._getframe(1)):
            assert code is not None
            if self._is_replaced(code):
                return None
            self._has_failed = True
        return self._process.poll()

    def _look(self) -> int | None:
        """The exit code. The process is not reaped before its end has been judged: how it ended
        would be unknown to the node's thread, which is notified at the same time."""
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._process.poll()
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _is_replaced(self, exit_code: int) -> bool:
        """Also while that is not decided yet."""
        now_s = self._clock.monotonic()
        if self._seen_dead_s is None:
            self._seen_dead_s = now_s
        local_rank, waited_s = self._worker.local_rank, now_s - self._seen_dead_s
        decision = self._decide(self._process.pid, local_rank, exit_code, waited_s)
        if decision:
            self._process.poll()
            self._process = self._start(self._worker)
            self._seen_dead_s = None
        return decision is not False
