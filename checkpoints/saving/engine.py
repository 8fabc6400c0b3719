"""Asynchronous saves: stage on the caller's thread, write and commit on a background thread.

The caller is blocked only while its share is copied. The background thread accesses the storage
only: no collectives, no live tensors. Every failure becomes a :class:`SaveOutcome`; training
continues.

A thread that hangs in a system call cannot be stopped. The caller's thread therefore checks the
deadline, too (in :meth:`Engine.outcomes`), and abandons a hung save for good: if the disk recovers,
that save does not commit. Until then saves are skipped, since the hung save owns its buffer.
"""

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
from collections.abc import Callable
from typing import Any, Literal

from checkpoints.catalog.commit import is_committed, is_waiting
from checkpoints.catalog.retention import FolderHistory
from checkpoints.errors import CheckpointError, WriteFailed
from checkpoints.format.names import CheckpointName
from checkpoints.format.state_tree import flatten, spec_of
from checkpoints.intervals import MAX_PART_POLL_S, PART_POLL_S, SAVE_DEADLINE_S
from checkpoints.policies.retention import LatestN, RetentionFunction
from checkpoints.saving.attempt import (
    WriteAttempt,
    commit_if_complete,
    discard,
    folder_removed,
    write_and_commit,
)
from checkpoints.saving.job import SaveJob
from checkpoints.saving.outcome import (
    SaveHandle,
    SaveOutcome,
    SaveStatus,
    WriterGroup,
    WriterThreadDied,
)
from checkpoints.saving.save import buffer_wait_s, check_json, check_world, lineage_of
from checkpoints.saving.staging import StagingPool
from checkpoints.storage.failures import ABSENT, is_permanent, writing
from checkpoints.storage.patient import patient
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root, storage_for
from checkpoints.tensors.partition import share_of

THREAD_NAME = "checkpoint-writer"
_NICENESS = 10


class Engine:
    """Saves asynchronously for the life of a process. Its one owner closes it.

    ``keep`` is applied after a commit. ``fence`` is called before one, on the writer thread: False
    means that the caller's world is stale (a :class:`WriterGroup` may have its own fence).
    ``deadline_s`` limits the time until any writer commits a save. While both buffers are in use, a
    save is skipped and counted with ``busy="skip"``; with ``"wait"`` it waits for a buffer, at most
    until the deadline. By default a single writer skips, and several wait: if each rank decided by
    its own buffers, a save that some ranks skip could never be committed.

    Raises :class:`ArgumentError` for a ``root`` that names no storage. Methods raise RuntimeError
    after :meth:`close`, and :class:`WriterThreadDied` once the writer thread has died of a bug.
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
        self._buffers = StagingPool(2)
        self._jobs: queue.Queue[SaveJob | Callable[[], object] | None] = queue.Queue()
        self._open: list[SaveJob] = []  # neither committed nor abandoned
        self._overdue: list[SaveJob] = []  # their files are not removed yet
        self._ended: deque[SaveOutcome] = deque()
        self._died: BaseException | None = None
        self._closed = False
        self.skipped = 0
        # A daemon: a hung disk must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()

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
        _, tensors = flatten(state)
        pieces = share_of([spec_of(n, t) for n, t in tensors.items()], world_size, rank, section)
        size = sum(span.count * spec.element_bytes for spec, span in pieces)
        pinned = any(t.is_cuda for t in tensors.values())
        grow = functools.partial(self._buffers.reserve, size, pinned=pinned)
        self.submit(grow) if background else grow()

    def submit(self, task: Callable[[], object]) -> None:
        """Run ``task`` on the writer thread, after earlier saves. An exception ends the thread."""
        self._check_alive()
        self._jobs.put(task)

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
        buffer = self._buffers.acquire(wait_s)
        if buffer is None:
            self.skipped += 1
            stall_s, reason = self._monotonic() - began_s, "earlier saves use all buffers"
            self._end(handle, SaveStatus.SKIPPED, reason=reason, stall_s=stall_s)
            return handle
        try:
            tree, tensors = flatten(state)
            specs = tuple(spec_of(key, tensor) for key, tensor in tensors.items())
            pieces = share_of(specs, world.size, world.rank, world.section)
            data = buffer.fill(pieces, tensors)
        except CheckpointError:
            self._buffers.release(buffer)
            raise
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when out of memory
            self._buffers.release(buffer)
            self._end(handle, SaveStatus.FAILED, reason=f"staging: {error}", error=error)
            return handle
        attempt = WriteAttempt(
            name=name,
            rank=world.rank,
            world_size=world.size,
            lineage=lineage,
            data_position=json.loads(json.dumps(data_position)),  # a private copy
            specs=specs,
            tree=tree,
            section=world.section,
            pieces=pieces,
            data=data,
            history=self._history.of(world.nonce),
        )
        now_s = self._monotonic()
        deadline_s = now_s + self._deadline_s
        job = SaveJob(attempt, handle, buffer, world.fence, began_s, now_s - began_s, deadline_s)
        with self._lock:
            self._open.append(job)
        self._jobs.put(job)
        return handle

    @property
    def has_free_buffer(self) -> bool:
        """Whether a staging buffer is free."""
        return self._buffers.has_free

    @property
    def in_flight(self) -> int:
        """The number of saves that are neither committed nor abandoned."""
        with self._lock:
            return len(self._open)

    @property
    def is_alive(self) -> bool:
        """Whether the writer thread runs: until :meth:`close`, or an error."""
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
        until_s = self._monotonic() + (math.inf if timeout_s is None else timeout_s)
        while True:
            self._abandon_overdue()
            self._report_death()
            with self._lock:
                handles = [(job.handle, job.deadline_s) for job in self._open]
            if not handles:
                return True
            left_s = min(until_s, *(deadline for _, deadline in handles)) - self._monotonic()
            if self._monotonic() >= until_s:
                return False
            handles[0][0].wait(min(max(left_s, 0.0), PART_POLL_S))

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the saves in flight and join the thread; False if it did not end in time.

        A hung writer thread is leaked: it is a daemon and never commits.
        """
        if self._closed:
            return not self.is_alive
        self._closed = True
        finished = self._died is not None or self.wait(timeout_s)
        self._abandon(lambda job: True, "the engine was closed")
        self._jobs.put(None)
        self._thread.join(timeout=PART_POLL_S * 10 if finished else 0.0)
        self._report_death()
        return finished and not self.is_alive

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        self._report_death()
        if self._closed:
            raise RuntimeError("the checkpoint engine is closed")

    def _report_death(self) -> None:
        if self._died is not None:
            raise WriterThreadDied("the checkpoint writer thread died") from self._died

    def _abandon_overdue(self) -> None:
        now_s, reason = self._monotonic(), f"not committed within {self._deadline_s:g} s"
        overdue = self._abandon(lambda job: now_s > job.deadline_s, reason)
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
            bytes_written=job.bytes_written or 0,
            **more,
        )

    def _end(self, handle: SaveHandle, status: SaveStatus, **more: Any) -> None:
        handle.is_written = True
        handle.outcome = SaveOutcome(step=handle.step, name=handle.name, status=status, **more)
        with self._lock:
            self._ended.append(handle.outcome)
        handle.ended.set()

    # -- the writer's thread ------------------------------------------------------------------

    def _work(self) -> None:
        # Linux priorities are per thread. If refused, saves only compete with training for CPUs.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            while self._work_once():
                pass
        except BaseException as error:  # noqa: BLE001  raised by the owner's next call
            self._died = error
            self._abandon(lambda job: True, f"the writer thread died: {error!r}")

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
            self._write(job)
        finally:
            self._buffers.release(job.buffer)
        job.written_s = self._monotonic()
        self._poll_waiting()
        return True

    def _write(self, job: SaveJob) -> None:
        if not self._is_open(job) or not self._may_commit(job):
            self._finish(job, SaveStatus.STALE, reason="its world ended before it was written")
            return
        began_s = self._monotonic()

        def note_time() -> None:
            job.write_s = self._monotonic() - began_s

        try:
            saved = write_and_commit(
                self._storage,
                job.attempt,
                keep=self._keep,
                fence=lambda: self._is_open(job) and self._may_commit(job),
                clock=self._clock,
                on_committed=note_time,
            )
        except Exception as error:  # noqa: BLE001  reported as the outcome
            note_time()
            self._fail(job, error)
            return
        job.bytes_written, job.handle.is_written = saved.bytes_written, True
        if saved.committed:
            self._finish(job, SaveStatus.COMMITTED, notes=saved.notes)
        elif not self._may_commit(job):
            self._finish(job, SaveStatus.STALE, reason=saved.notes[0])

    def _poll_waiting(self) -> None:
        """Check whether saves that wait for other writers are committed, or can be."""
        now_s = self._monotonic()
        with self._lock:
            waiting = [job for job in self._open if job.bytes_written is not None]
        for job in waiting:
            if now_s < job.poll_at_s:
                continue
            job.poll_at_s = now_s + poll_pause_s(now_s - job.written_s)
            try:
                self._poll(job)
            except Exception as error:  # noqa: BLE001  reported as the outcome
                if _is_transient(error):
                    job.problem = str(error)  # the share is written: it may succeed later
                else:
                    self._fail(job, error)
        self._abandon_overdue()
        self._discard_overdue()

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
            if not self._may_commit(job):
                self._finish(job, SaveStatus.STALE, reason="its world ended")
            return
        written, may_commit = job.bytes_written or 0, functools.partial(self._may_commit, job)
        saved = commit_if_complete(storage, job.attempt, written, keep=self._keep, fence=may_commit)
        if saved.committed:
            self._finish(job, SaveStatus.COMMITTED, notes=saved.notes)
        elif not self._may_commit(job):
            self._finish(job, SaveStatus.STALE, reason=saved.notes[0])
        else:
            job.problem = saved.notes[0]

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

    def _is_open(self, job: SaveJob) -> bool:
        with self._lock:
            return job in self._open

    def _may_commit(self, job: SaveJob) -> bool:
        return all(fence is None or fence() for fence in (self._fence, job.fence))


def poll_pause_s(waited_s: float) -> float:
    """The pause before other writers' parts are listed again: long for those that are far behind,
    since an object store bills each request."""
    return min(max(waited_s / 2, PART_POLL_S), MAX_PART_POLL_S)


def _is_transient(error: Exception) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and not is_permanent(cause)
