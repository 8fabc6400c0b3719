"""The last checkpoint of a process: on disk before the process ends, or abandoned after a time.

All ranks of a complete world save together, as usual, and wait until one of them has committed.
If peers have died, their shares never arrive. But every rank has the complete state, so one of the
remaining ranks writes all of it, as a world of one. The ranks need no agreement on which: they list
the folder in the order of their ranks, and the first one that finds no other attempt writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime, timezone
from enum import Enum

import checkpoints
from checkpoints import CheckpointName, SaveHandle, SaveStatus
from checkpoints.format.lineage import why_abandoned
from checkpoints.format.names import parse_attempt, parse_committed
from checkpoints.storage.failures import is_transient
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.saver import Saver
from elastic.training.state.job_state import JobState
from elastic.tuning.worker_intervals import (
    LAST_SAVE_PEERS_S,
    LAST_SAVE_QUIET_S,
    LAST_SAVE_REPEAT_S,
    LAST_SAVE_TURN_S,
    SAVE_SLICE_S,
)

# How much longer a rank waits for other ranks' shares than for its own.
PEERS_FACTOR = 2.0
LAST_TURN = 8  # higher ranks share this turn: lower ranks rarely all die at once


class _StepStatus(Enum):
    """The status of a step in the folder."""

    COMMITTED = "it is committed"
    BEGUN = "another rank is writing it"
    NOTHING = "no rank is writing it"
    UNKNOWN = "the folder cannot be listed, or the disk does not respond"


class LastSave:
    """One attempt to commit the job's current step. ``saver`` has a policy."""

    def __init__(
        self, saver: Saver, job: JobState, budget_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._saver = saver
        self._job = job
        self._clock = clock
        self._began_s = clock.monotonic()
        self._until_s = self._began_s + budget_s
        self._is_announced = False
        self._step = job.progress.step

    def together(self) -> bool:
        """Called by every rank of a complete world at the same step. Returns whether the step is
        committed."""
        if not self._saver.writers.is_writer:
            return self._wait_until_committed()
        if self._saver.writers.is_complete:
            self._saver.save(self._job, wait_s=self._left_s())
            handle = self._saver.handle_of(self._step)
            if handle is not None and _was_skipped(
                handle
            ):  # a save during training does not wait for a buffer; this one does
                handle = self._saver.save_again(self._job, wait_s=self._left_s())
            is_alone = self._saver.writers.world_size == 1
            if is_alone:
                handle = self._repeated(
                    handle, lambda: self._saver.save_again(self._job, wait_s=self._left_s())
                )
            if self._wait_for_commit(handle, is_alone=is_alone):
                return True
            # An earlier save that was still running when the end of the job was announced (a
            # world without members) is stale: it did not commit, so this rank may.
            is_overtaken = _is_stale(handle) and self._saver.is_permitted()
            if is_alone and not is_overtaken:
                return False  # no permission, or the disk has failed or does not respond
        return self.alone()

    def alone(self) -> bool:
        """Let one of the remaining ranks write the complete state. Returns whether the step is
        committed."""
        if self._saver.has_committed(self._step):
            return True
        if (self._job.is_sharded or self._job.is_rebuilt) and self._saver.writers.world_size > 1:
            return False  # this rank has only shards
        turn_s = self._clock.monotonic() + LAST_SAVE_TURN_S * min(
            self._saver.writers.rank, LAST_TURN
        )
        while self._left_s() > 0:
            # Checked before its turn, too: a rank that sees the step committed stops waiting.
            self._wait(
                lambda: False, at_most_s=min(LAST_SAVE_TURN_S, turn_s - self._clock.monotonic())
            )
            status = self._list()
            if status is _StepStatus.NOTHING and self._clock.monotonic() >= turn_s:
                return self._write_all()
            if status in (_StepStatus.COMMITTED, _StepStatus.UNKNOWN):
                return status is _StepStatus.COMMITTED
            if status is _StepStatus.BEGUN:
                self._wait(lambda: False, at_most_s=LAST_SAVE_TURN_S)
        return False

    def _wait_until_committed(self) -> bool:
        """Wait until another replica has committed the state."""
        while self._left_s() > 0:
            status = self._list()
            if status in (_StepStatus.COMMITTED, _StepStatus.UNKNOWN):
                return status is _StepStatus.COMMITTED
            self._wait(lambda: False, at_most_s=LAST_SAVE_TURN_S)
        return False

    def share(self) -> bool:
        """Write only this rank's share. It is committed if all other ranks do the same."""
        writers, left = self._saver.writers, self._job.progress.callbacks_left
        if left and writers.is_complete and writers.is_writer:
            # Ranks that have called these callbacks may have saved this step, in another state.
            group = writers.before_callbacks(left)
            handle = self._saver.begin(self._job, group, wait_s=self._left_s())
        else:
            if writers.is_complete:
                self._saver.save(self._job, wait_s=self._left_s())
            handle = self._saver.handle_of(self._step)
        return handle is not None and self._wait(lambda: handle.is_written)

    def _write_all(self) -> bool:
        world = self._saver.writers.of_one(checkpoints.new_nonce())
        in_memory = self._saver.begin_in_memory(self._job, world, wait_s=self._left_s())
        if in_memory is not None:  # faster, and it survives this process
            self._wait(lambda: in_memory.outcome is not None, at_most_s=self._left_s() / 2)

        def begin() -> SaveHandle | None:
            return self._saver.begin(self._job, world, wait_s=self._left_s())

        return self._wait_for_commit(self._repeated(begin(), begin), is_alone=True)

    def _repeated(
        self, handle: SaveHandle | None, again: Callable[[], SaveHandle | None]
    ) -> SaveHandle | None:
        """The save, repeated for LAST_SAVE_REPEAT_S while the storage fails transiently: no later
        save would hold this state."""
        until_s = self._clock.monotonic() + LAST_SAVE_REPEAT_S
        while handle is not None:
            self._wait(functools.partial(_is_written, handle))
            if not _failed_transiently(handle):
                break
            if self._clock.monotonic() >= min(until_s, self._until_s):
                break
            self._wait(lambda: False, at_most_s=LAST_SAVE_TURN_S)
            handle = again()
        return handle

    def _wait_for_commit(self, handle: SaveHandle | None, *, is_alone: bool = False) -> bool:
        """``is_alone``: no other rank writes a share, so the engine commits it or fails."""
        if handle is None:
            return self._saver.has_committed(self._step)
        began_s = self._clock.monotonic()
        self._wait(lambda: handle.is_written)
        took_s = self._clock.monotonic() - began_s
        patience_s = LAST_SAVE_REPEAT_S if is_alone else LAST_SAVE_PEERS_S
        self._wait(
            lambda: handle.outcome is not None, at_most_s=max(patience_s, PEERS_FACTOR * took_s)
        )
        self._saver.poll()
        return self._saver.has_committed(self._step)

    def _list(self) -> _StepStatus:
        """List the folder on the engine's thread, because a disk may hang.

        A failure that the storage's own repetitions do not overcome ends the wait: the folder is
        unlikely to come back while this process waits, and it holds no state that others need.
        """
        listings: list[list[str] | None] = []
        self._saver.list_later(listings.append)
        if not self._wait(lambda: bool(listings)) or (listing := listings[0]) is None:
            return _StepStatus.UNKNOWN
        target = (self._saver.writers.generation, self._step)
        committed = [name for name in map(parse_committed, listing) if name]
        if any(_place(name) >= target or self._is_inherited(name) for name in committed):
            return _StepStatus.COMMITTED
        # This world's joint attempts do not count: they wait for ranks that have died.
        attempts = [name for name in map(parse_attempt, listing) if name]
        others = [name for name in attempts if name.nonce != self._saver.writers.nonce]
        return (
            _StepStatus.BEGUN if any(_place(n) == target for n in others) else _StepStatus.NOTHING
        )

    def _is_inherited(self, name: CheckpointName) -> bool:
        """Whether an earlier generation has committed this step, with which later ones began: their
        writers do not save it again."""
        lineage = self._saver.writers.lineage
        return name.step == self._step and why_abandoned(name, lineage) is None

    def _left_s(self) -> float:
        return max(0.0, self._until_s - self._clock.monotonic())

    def _wait(self, done: Callable[[], bool], *, at_most_s: float | None = None) -> bool:
        """Wait until ``done()`` or the end of the budget. Returns whether it is done."""
        left_s = self._left_s()
        until_s = self._clock.monotonic() + (
            left_s if at_most_s is None else min(left_s, at_most_s)
        )
        while not done():
            if self._clock.monotonic() >= until_s:
                return False
            self._announce()
            self._saver.poll()  # detects a hung disk or a dead engine
            self._clock.sleep(SAVE_SLICE_S)
        return True

    def _announce(self) -> None:
        """Log once what this process waits for, if that takes long."""
        if self._is_announced or self._clock.monotonic() - self._began_s < LAST_SAVE_QUIET_S:
            return
        self._is_announced = True
        end = datetime.fromtimestamp(self._clock.wall() + self._left_s(), timezone.utc)
        get_logger().info(
            "waiting for the checkpoint of step %d in %s, for at most %.0f s, until %s UTC",
            *(self._step, self._saver.place, self._left_s(), end.strftime("%H:%M:%S")),
        )


def _was_skipped(handle: SaveHandle) -> bool:
    return handle.outcome is not None and handle.outcome.status is SaveStatus.SKIPPED


def _is_written(handle: SaveHandle) -> bool:
    return handle.is_written


def _failed_transiently(handle: SaveHandle) -> bool:
    return handle.outcome is not None and is_transient(handle.outcome.error)


def _is_stale(handle: SaveHandle | None) -> bool:
    outcome = handle.outcome if handle is not None else None
    return outcome is not None and outcome.status is SaveStatus.STALE


def _place(name: CheckpointName) -> tuple[int, int]:
    return name.generation, name.step
