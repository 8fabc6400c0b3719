"""Asynchronous saves."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from checkpoints.commit import is_committed, is_waiting, missing_writers
from checkpoints.errors import CheckpointError, WriteFailed
from checkpoints.intervals import (
    COMMIT_PATIENCE_S,
    MAX_PART_POLL_S,
    PART_POLL_S,
    SAVE_DEADLINE_S,
    WRITER_SLICE_S,
)
from checkpoints.names import CheckpointName, writer_file
from checkpoints.objects import Root, storage_for
from checkpoints.policies import LatestN, RetentionFunction
from checkpoints.retention import FolderHistory
from checkpoints.save_plan import SavePlanner
from checkpoints.saving import (
    Progress,
    SaveHandle,
    SaveJob,
    SaveOutcome,
    SaveStatus,
    StagingPool,
    WriteAttempt,
    WriterGroup,
    WriterThreadDied,
    buffer_wait_s,
    check_json,
    check_world,
    commit_if_complete,
    discard,
    folder_removed,
    give_up,
    lineage_of,
    write_unless_committed,
)
from checkpoints.storage import ABSENT, Storage, is_transient, patient, writing

# ----------------------------------------------------------------------------
# Asynchronous saves: stage on the caller's thread, write and commit on a background thread.
#
# The caller is blocked only while its share is copied. The background thread accesses the storage
# only: no collectives, no live tensors. Every failure becomes a :class:`SaveOutcome`; training
# continues.
#
# A thread that hangs in a system call cannot be stopped. The caller's thread therefore checks the
# deadline, too (in :meth:`Engine.outcomes`), and abandons a hung save for good: if the disk
# recovers, that save does not commit. Until then saves are skipped, since the hung save owns its
# buffer.
#
# A bug on the background thread ends the saves that are in flight, is reported by
# threading.excepthook, and leaves the thread running: later saves may not meet it.
#
# The deadline limits the time without progress, not the size of a save: each chunk that is
# written, and each sign of another writer, renews it.

THREAD_NAME = "checkpoint-writer"
_NICENESS = 10


class Engine:
    """Saves asynchronously for the life of a process. Its one owner closes it.

    ``keep`` is applied after a commit, and before one if the storage is full. ``fence`` is called
    before each, on the writer thread: False means that the caller's world is stale (a
    :class:`WriterGroup` may have its own fence).
    ``deadline_s`` limits the time in which a save makes no progress: this writer writes no chunk,
    and no other one that it waits for. It grows with the pauses that a slow storage has been seen
    to make. While both buffers are in use, a save is skipped and counted with ``busy="skip"``; with
    ``"wait"`` it waits for a buffer, at most for ``deadline_s``. By default a single writer skips,
    and several wait: if each rank decided by its own buffers, a save that some ranks skip could
    never be committed.

    As a context manager, it finishes all saves; if the block raises, only this writer's shares, so
    that the exception does not wait for writers that may be gone.

    Raises :class:`ArgumentError` for a ``root`` that names no storage. Methods raise RuntimeError
    after :meth:`close`, and :class:`WriterThreadDied` if SystemExit or the like has ended the
    writer thread.
    """

    def __init__(
        self,
        root: Root,
        *,
        keep: RetentionFunction | None = LatestN(3),  # noqa: B008  frozen
        fence: Callable[[], bool] | None = None,
        deadline_s: float = SAVE_DEADLINE_S,
        busy: Literal["skip", "wait"] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage: Storage = patient(storage_for(root))
        self._keep = keep
        self._history = FolderHistory()
        self._fence = fence
        self._deadline_s = deadline_s
        self._busy = busy
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._planner = SavePlanner()
        self._buffers = StagingPool(2)
        self._jobs: queue.Queue[SaveJob | Callable[[], object] | None] = queue.Queue()
        self._open: list[SaveJob] = []  # neither committed nor abandoned
        self._overdue: list[SaveJob] = []  # their files are not removed yet
        self._progress = Progress(monotonic)
        self._ended: deque[SaveOutcome] = deque()
        self._died: BaseException | None = None
        self._closed = False
        self.skipped = 0
        self._is_stuck = False
        # A daemon: a hung disk must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._starting = threading.Lock()

    # -- the caller's thread ------------------------------------------------------------------

    def reserve(
        self,
        state: object,
        *,
        rank: int = 0,
        world_size: int = 1,
        section: tuple[int, ...] | None = None,
        background: bool = False,
    ) -> None:
        """Allocate both buffers for ``state``, so that the first save only copies.

        ``section``: as in :class:`WriterGroup`. With ``background`` the writer thread allocates
        them, between saves. Raises :class:`StateError` for a state that cannot be saved,
        :class:`ArgumentError` for a rank outside of the world or DTensors of another mesh.
        """
        plan = self._planner.plan(state, world_size=world_size, rank=rank, section=section).plan
        grow = functools.partial(self._buffers.reserve, plan.size_bytes, pinned=bool(plan.gpus))
        self.submit(grow) if background else grow()

    def submit(self, task: Callable[[], object]) -> None:
        """Run ``task`` on the writer thread, after earlier saves. It reports its own failures."""
        self._check_alive()
        self._submit(task)

    def save_async(
        self,
        state: object,
        *,
        step: int,
        world: WriterGroup,
        data_position: Any = None,
        wait_s: float | None = None,
    ) -> SaveHandle:
        """Copy this rank's share of ``state`` and return; the background thread writes it.

        Every rank of ``world`` calls it for the same steps. Once it returns, the tensors may
        change. ``wait_s`` limits the wait for a free buffer and overrides ``busy``. Raises
        :class:`ArgumentError` (``busy="skip"`` with several writers) or :class:`StateError` for
        caller mistakes; every other failure is in the outcome of the handle.
        """
        self._check_alive()
        check_world(world.rank, world.size, world.section)
        if wait_s is None:
            wait_s = buffer_wait_s(self._busy, world.size, self._deadline_s)
        check_json(data_position)
        name = CheckpointName(step, world.generation, world.nonce)
        lineage = lineage_of(name, world.lineage)
        handle = SaveHandle(str(name), step)
        began_s = self._monotonic()
        self._abandon_overdue()
        try:
            buffer = self._buffers.acquire(handle, wait_s)
            if buffer is None:
                self.skipped += 1
                self._is_stuck = True
                stall_s, reason = self._monotonic() - began_s, "earlier saves use all buffers"
                self._end(handle, SaveStatus.SKIPPED, reason=reason, stall_s=stall_s)
                return handle
            planned, data = buffer.fill(self._planner, state, world)
            attempt = WriteAttempt(
                name=name,
                rank=world.rank,
                world_size=world.size,
                lineage=lineage,
                data_position=json.loads(json.dumps(data_position)),  # a private copy
                named=planned.named,
                section=world.section,
                data=self._progress.watched(data),
                keep=self._keep,
                fence=lambda: self._is_open(handle) and self._may_commit(world.fence),
                history=self._history.of(world.nonce),
            )
            now_s = self._monotonic()
            deadline_s = now_s + self._limit_s
            job = SaveJob(attempt, handle, world.fence, began_s, now_s - began_s, deadline_s)
            with self._lock:
                self._open.append(job)
            self._submit(job)
        except CheckpointError:  # before the writer thread has the job
            self._buffers.release(handle)
            raise
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when out of memory
            self._buffers.release(handle)
            self._end(handle, SaveStatus.FAILED, reason=f"staging: {error}", error=error)
        except BaseException:
            self._withdraw(handle)
            raise
        return handle

    def _withdraw(self, handle: SaveHandle) -> None:
        """Undo a save that an exception interrupted at any point, such as KeyboardInterrupt.

        The writer thread frees the buffer: if it has the job already, it must not lose the buffer
        while it reads.
        """
        reason = "its caller was interrupted"
        self._abandon(lambda job: job.handle is handle, reason)
        self._submit(lambda: self._buffers.release(handle))

    @property
    def has_free_buffer(self) -> bool:
        """Whether a staging buffer is free."""
        return self._buffers.has_free

    @property
    def is_stuck(self) -> bool:
        """Whether the storage hangs: a save was skipped because no buffer was free, and none is
        yet."""
        self._is_stuck = self._is_stuck and not self._buffers.has_free
        return self._is_stuck

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight that can be expected to be committed.

        A written save that waits for longer than :data:`COMMIT_PATIENCE_S` lacks a share that
        failed on another rank. A policy that saves when none is in flight need not wait for its
        deadline.
        """
        now_s = self._monotonic()
        with self._lock:
            return any(
                not job.handle.is_written or now_s - job.began_s < COMMIT_PATIENCE_S
                for job in self._open
            )

    @property
    def in_flight(self) -> int:
        """The number of saves that are neither committed nor abandoned."""
        with self._lock:
            return len(self._open)

    @property
    def is_alive(self) -> bool:
        """Whether the writer thread runs: from the first save until :meth:`close`, or an error."""
        return self._thread.is_alive()

    def outcomes(self) -> tuple[SaveOutcome, ...]:
        """The saves that ended since the last call. Call it every step: it detects hung saves."""
        self._abandon_overdue()
        self._report_death()
        with self._lock:
            ended = tuple(self._ended)
            self._ended.clear()
        return ended

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight; False after ``timeout_s``."""
        return self._wait(timeout_s, lambda job: True)

    def finish_writing(self, timeout_s: float | None = None) -> bool:
        """Wait until this writer's share of every save is written; False after ``timeout_s``. Other
        writers may still commit them."""
        return self._wait(timeout_s, lambda job: not job.handle.is_written)

    def _wait(self, timeout_s: float | None, is_awaited: Callable[[SaveJob], bool]) -> bool:
        until_s = self._monotonic() + (math.inf if timeout_s is None else timeout_s)
        while True:
            self._abandon_overdue()
            self._report_death()
            with self._lock:
                handles = [job.handle for job in self._open if is_awaited(job)]
            if not handles:
                return True
            left_s = until_s - self._monotonic()
            if left_s <= 0:
                return False
            handles[0].wait(min(left_s, WRITER_SLICE_S))

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the saves in flight and join the thread; False if it did not end in time.

        A hung writer thread is leaked: it is a daemon and never commits.
        """
        return self._close(timeout_s, lambda job: True)

    def _close(self, timeout_s: float | None, is_awaited: Callable[[SaveJob], bool]) -> bool:
        if self._closed:
            return not self.is_alive
        self._closed = True
        finished = self._died is not None or self._wait(timeout_s, is_awaited)
        self._abandon(lambda job: True, "the engine was closed")
        with self._starting:
            self._jobs.put(None)
            if self._thread.ident is None:
                return finished
        self._thread.join(timeout=PART_POLL_S * 10 if finished else 0.0)
        self._report_death()
        return finished and not self.is_alive

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            with contextlib.suppress(WriterThreadDied):  # the block's exception says more
                self._close(None, lambda job: not job.handle.is_written)

    def _check_alive(self) -> None:
        self._report_death()
        if self._closed:
            raise RuntimeError("the checkpoint engine is closed")

    def _report_death(self) -> None:
        if self._died is not None:
            raise WriterThreadDied("the checkpoint writer thread died") from self._died

    @property
    def _limit_s(self) -> float:
        """How long a save may make no progress."""
        return max(self._deadline_s, self._progress.patience_s)

    def _abandon_overdue(self) -> None:
        now_s, limit_s = self._monotonic(), self._limit_s
        # A save that is queued waits for the earlier ones, and is not late while they progress.
        writing_until_s = self._progress.last_s + limit_s

        def is_overdue(job: SaveJob) -> bool:
            is_written = job.written is not None
            return now_s > (job.deadline_s if is_written else max(job.deadline_s, writing_until_s))

        overdue = self._abandon(is_overdue, f"no progress within {limit_s:g} s")
        with self._lock:
            self._overdue += overdue

    def _abandon(self, which: Callable[[SaveJob], bool], reason: str) -> list[SaveJob]:
        with self._lock:
            jobs = [job for job in self._open if which(job)]
        for job in jobs:
            problem = f": {job.problem}" if job.problem else ""
            self._finish(job, SaveStatus.ABANDONED, reason=f"{reason}{problem}")
        return jobs

    # -- either thread ------------------------------------------------------------------------

    def _finish(self, job: SaveJob, status: SaveStatus, **more: Any) -> None:
        """End a job exactly once, even if both threads call this."""
        with self._lock:
            if job not in self._open:
                return
            self._open.remove(job)
        self._end(
            job.handle,
            status,
            stall_s=job.stall_s,
            write_s=job.write_s,
            took_s=self._monotonic() - job.began_s,
            bytes_written=job.written.bytes_written if job.written is not None else 0,
            **more,
        )

    def _end(self, handle: SaveHandle, status: SaveStatus, **more: Any) -> None:
        handle.is_written = True
        handle.outcome = SaveOutcome(step=handle.step, name=handle.name, status=status, **more)
        with self._lock:
            self._ended.append(handle.outcome)
        handle.ended.set()

    def _submit(self, job: SaveJob | Callable[[], object]) -> None:
        with self._starting:
            self._jobs.put(job)
            if self._thread.ident is None and not self._closed:
                self._thread.start()

    # -- the writer's thread ------------------------------------------------------------------

    def _work(self) -> None:
        # Linux priorities are per thread. If refused, saves only compete with training for CPUs.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            while self._work_once_or_report():
                pass
        except BaseException as error:  # noqa: BLE001  raised by the owner's next call
            self._died = error
            self._abandon(lambda job: True, f"the writer thread died: {error!r}")

    def _work_once_or_report(self) -> bool:
        try:
            return self._work_once()
        except Exception as error:  # noqa: BLE001  a bug: failures of the storage are outcomes
            abandoned = self._abandon(lambda job: True, f"a bug on the writer thread: {error!r}")
            with self._lock:
                self._overdue += abandoned
            thread = threading.current_thread()
            details = (type(error), error, error.__traceback__, thread)
            threading.excepthook(threading.ExceptHookArgs(details))
            return True

    def _work_once(self) -> bool:
        """Process one job, or poll those that wait for other writers; False at the end."""
        try:
            job = self._jobs.get(timeout=PART_POLL_S if self.in_flight else None)
        except queue.Empty:
            self._poll_waiting()
            return True
        if job is None:
            self._discard_overdue()
            return False
        if not isinstance(job, SaveJob):
            job()
            return True
        try:
            with self._progress:
                self._write(job)
        finally:
            self._buffers.release(job.handle)
        self._poll_waiting()
        return True

    def _write(self, job: SaveJob) -> None:
        began_s = self._monotonic()
        try:
            if not self._is_open(job.handle) or not self._may_commit(job.fence):
                self._finish(job, SaveStatus.STALE, reason="its world ended before it was written")
                return
            written = write_unless_committed(self._storage, job.attempt, self._clock)
            if written is None:
                self._finish(job, SaveStatus.COMMITTED)
                return
        except Exception as error:  # noqa: BLE001  reported as the outcome
            job.write_s = self._monotonic() - began_s
            self._fail(job, error)
            return
        # From here on this share is safe, and what fails now is tried again until the deadline.
        job.written, job.written_s = written, self._monotonic()
        job.write_s = job.written_s - began_s
        # The other writers have begun at about the same time, and may be slower.
        job.deadline_s = job.written_s + max(self._limit_s, job.write_s)
        self._try(job, functools.partial(self._commit, job, began_s))
        job.handle.is_written = True

    def _poll_waiting(self) -> None:
        """Check whether saves that wait for other writers are committed, or can be."""
        now_s = self._monotonic()
        with self._lock:
            waiting = [job for job in self._open if job.written is not None]
        for job in waiting:
            if now_s < job.poll_at_s:
                continue
            job.poll_at_s = now_s + poll_pause_s(now_s - job.written_s)
            self._try(job, functools.partial(self._poll, job))
        self._abandon_overdue()
        self._discard_overdue()

    def _try(self, job: SaveJob, step: Callable[[], None]) -> None:
        """Advance a save whose share is written. A transient failure is its last problem, not its
        end."""
        try:
            step()
        except Exception as error:  # noqa: BLE001  reported as the outcome
            if is_transient(error):
                job.problem = str(error)
            else:
                self._fail(job, error)

    def _poll(self, job: SaveJob) -> None:
        name, storage = job.attempt.name, self._storage
        with writing(storage.place):
            try:
                files = storage.list(name.attempt)
            except ABSENT:
                if is_committed(storage, name):
                    self._finish(job, SaveStatus.COMMITTED)
                else:
                    self._fail(job, folder_removed(name))
                return
        if is_waiting(files, job.attempt.world_size):
            if not self._may_commit(job.fence):
                self._finish(job, SaveStatus.STALE, reason="its world ended")
            else:
                self._observe_writers(job, files)
            return
        self._commit(job)

    def _observe_writers(self, job: SaveJob, files: Sequence[str]) -> None:
        """Renew the deadline if the first of the writers that are missing has made progress."""
        attempt = job.attempt
        rank = min(missing_writers(files, attempt.world_size))
        job.problem = f"waiting for writer {rank}"
        size_bytes = 0
        with contextlib.suppress(*ABSENT):  # it has not begun, or an object store shows it at once
            size_bytes = self._storage.size(
                f"{attempt.name.attempt}/{writer_file(rank, attempt.world_size)}"
            )
        if (rank, size_bytes) != job.seen:
            job.seen = (rank, size_bytes)
            job.deadline_s = max(job.deadline_s, self._monotonic() + self._limit_s)

    def _commit(self, job: SaveJob, began_s: float | None = None) -> None:
        """Commit if all shares are written; fail if they can never form a checkpoint."""

        def note_time() -> None:
            if began_s is not None:
                job.write_s = self._monotonic() - began_s

        attempt = job.attempt
        assert job.written is not None
        saved = commit_if_complete(
            self._storage,
            attempt,
            job.written,
            on_committed=note_time,
        )
        if saved.committed:
            self._finish(job, SaveStatus.COMMITTED, notes=saved.notes)
        elif not self._may_commit(job.fence):
            self._finish(job, SaveStatus.STALE, reason=saved.notes[0])
        elif saved.is_waiting:
            job.problem = saved.notes[0]
        elif self._is_open(job.handle):
            give_up(self._storage, attempt.name, attempt.rank, attempt.world_size)
            self._fail(job, WriteFailed(f"{attempt.name} was {saved.notes[0]}"))

    def _discard_overdue(self) -> None:
        """Free the space of saves that were not committed in time."""
        with self._lock:
            overdue, self._overdue = self._overdue, []
        for job in overdue:
            discard(self._storage, job.attempt.name, job.attempt.rank, job.attempt.world_size)

    def _fail(self, job: SaveJob, error: Exception) -> None:
        if not isinstance(error, CheckpointError):
            cause = error
            error = WriteFailed(f"saving {job.handle.name} failed: {cause!r}")
            error.__cause__ = cause
        self._finish(job, SaveStatus.FAILED, reason=str(error), error=error)

    def _is_open(self, handle: SaveHandle) -> bool:
        with self._lock:
            return any(job.handle is handle for job in self._open)

    def _may_commit(self, of_world: Callable[[], bool] | None) -> bool:
        return all(fence is None or fence() for fence in (self._fence, of_world))


def poll_pause_s(waited_s: float) -> float:
    """The pause before other writers' parts are listed again: long for those that are far behind,
    since an object store bills each request."""
    return min(max(waited_s / 2, PART_POLL_S), MAX_PART_POLL_S)
