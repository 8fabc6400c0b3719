"""Collectives in flight, and how a thread stops waiting for them.

When a connection ends, gloo drops its queued sends without an error: it passes the error only to
the older kind of buffer, which collectives do not use (gloo, transport/tcp/pair.cc,
``Pair::signalException``). A wait for such a send lasts until the group's timeout, half an hour,
and nothing can release it: in 150 aborts of a small all-reduce at random moments several ranks hung
[measured, torch 2.13]. The death of a peer has the same effect.

So no thread blocks inside gloo. Threads wait here, for the collective or for the end of the
group; a group whose collectives do not return is leaked, not destroyed.

When a group is aborted, its collectives on a stream (:mod:`elastic.process_group.semantics`) return
as if they had succeeded. The abort is recorded first, so a check here after a collective has ended
shows whether its result is valid. A synchronous call (``dist.all_reduce(t)``) has no work to check:
NCCL runs it on the current stream and returns nothing. So groups count the collectives that they
begin. If more have begun than were waited for, :meth:`PendingWorks.settle` waits for the stream.

While ``ncclCommAbort`` hangs, every query of a work hangs too, and holds the interpreter lock
(NCCLUtils.cpp: ``NCCLComm::abort`` and ``isAborted`` take the same mutex). So the flag is checked
first.

A script may catch the error of a collective (`except RuntimeError: continue`). So errors that end
the world are recorded here, and raised again at the end of the step.
"""

from __future__ import annotations

import datetime
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic import torch_private
from elastic.clock import SYSTEM_CLOCK
from elastic.process_group.semantics import HOST, Semantics, StreamEvent
from elastic.process_group.wait_phase import (
    LongWait,
    begin_host_wait,
    begin_stream_wait,
    begin_wait,
    describe_group,
    end_stream_wait,
    end_wait,
    queued,
)
from elastic.tuning.worker_intervals import (
    DRAIN_SLICE_S,
    GLOO_SLICE_MS,
    STREAM_SLICE_S,
    WORKER_SLICE_S,
)
from elastic.world.faults import GroupAborted, is_world_fault

_GLOO_SLICE = datetime.timedelta(milliseconds=GLOO_SLICE_MS)
_wait_in_torch = dist.Work.wait  # before elastic/process_group/patches.py replaces it
_TAKEN_DOWN = "the group was taken down"
_QUEUED_UNTIL_PRUNED = 64
_CPU = torch.device("cpu")

Done = Callable[[BaseException | None], object]


class PendingWorks:
    """The collectives of one group. Thread-safe.

    ``is_on_stream``: the group's collectives may be queued on a device. ``record``: records an
    event behind everything queued there so far. ``on_error``: aborts the group.
    """

    def __init__(
        self,
        *,
        is_on_stream: bool = False,
        record: Callable[[], StreamEvent] | None = None,
        on_error: Callable[[], object] = lambda: None,
    ) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, tuple[dist.Work, Done | None]] = {}
        self._next = 0
        self._begun: list[dist.Work] = []  # by the training thread
        self._queued: list[dist.Work] = []  # on a stream, by the training thread
        self._is_aborted = False
        self._is_on_stream = is_on_stream
        self._record = record
        self._on_error = on_error
        self._waited_for: dict[str, int] = {}  # number of collectives, by group
        self._failure = ""  # the first error that showed that the world is over

    def begin(self, work: dist.Work) -> None:
        """Add a collective on the CPU, for :meth:`finish` or :meth:`finish_one`. Training thread
        only.

        Cheaper than :meth:`start`: no gloo thread has to run Python. A collective that is never
        finished, because another one has failed, remains pending for :meth:`drain`.
        """
        self._begun.append(work)

    def finish(self) -> None:
        """Return when all begun collectives have succeeded; raise their error, or GroupAborted."""
        if not self._begun:
            return
        last = self._begun[-1]
        before = begin_host_wait(last)
        try:
            for work in self._begun:
                self._wait_in_slices(work)
        finally:
            end_wait(last, before)
        self._begun.clear()

    def finish_one(self, work: dist.Work) -> None:
        """Like :meth:`finish`, for this collective only."""
        if not any(work is begun for begun in self._begun):
            self._begun.append(work)  # until it returns
        before = begin_host_wait(work)
        try:
            self._wait_in_slices(work)
        finally:
            end_wait(work, before)
        self._begun.remove(work)

    def _wait_in_slices(self, work: dist.Work) -> None:
        has_ended, long_wait = False, LongWait()
        while True:
            if self._is_aborted and not (has_ended or work.is_completed()):
                self._note(aborted := GroupAborted(_TAKEN_DOWN))
                raise aborted
            try:
                _wait_in_torch(work, _GLOO_SLICE)
                return
            except RuntimeError as error:  # of the collective, or the slice has expired
                if has_ended:
                    self._note(error)
                    raise
                has_ended = work.is_completed()
                long_wait.look()

    # -- collectives on a stream ----------------------------------------------------------------

    def queue(self, work: dist.Work) -> None:
        """Make the current stream wait for a collective; the host continues. The result is valid
        only if :meth:`settle` returns. Raises the collective's error, or GroupAborted."""
        if not self._is_on_stream:
            self._wait_on_stream(work)  # it has ended
            return
        self.raise_if_aborted()
        self._raise_error_of(work)
        self._wait_on_stream(work)
        self.raise_if_aborted()
        queued()
        if len(self._queued) >= _QUEUED_UNTIL_PRUNED:
            self._queued = [queued for queued in self._queued if not queued.is_completed()]
        self._queued.append(work)

    def finish_on_stream(self, work: dist.Work | None) -> None:
        """Return when the collective has succeeded and the current stream waits for it; raise its
        error, or GroupAborted.

        ``Work.wait`` raises the error of a collective that has ended. ``Work.is_success`` would not
        raise, but NCCL does not implement it (ProcessGroupNCCL.cpp, ``WorkNCCL::isSuccess``). NCCL
        does not report an abort as an error, so the abort is checked last: it is recorded before
        it ends any collective.
        """
        if work is None:  # this rank is not in the group
            return
        before = begin_wait(work)
        try:
            self._wait_until(work.is_completed)
        finally:
            end_wait(work, before)
        self._raise_error_of(work)
        self._wait_on_stream(work)
        self.raise_if_aborted()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        long_wait = LongWait()
        while True:
            self.raise_if_aborted()
            if is_done():
                return
            long_wait.look()
            SYSTEM_CLOCK.sleep(STREAM_SLICE_S)

    def _raise_error_of(self, work: dist.Work) -> None:
        """If torch has detected an error of the collective, abort the group and raise the error:
        from then on no other collective of the group counts."""
        error = torch_private.error_of(work)
        if error is not None:
            self._on_error()
            self._note(error)
            raise error

    def mark(self) -> int:
        """How many collectives the default group has begun, for :meth:`covered`. Call it on the
        thread that begins them, right after one that will be waited for."""
        return torch_private.collectives_begun() if self._is_on_stream else 0

    def covered(self, mark: int) -> None:
        """Record that the collective before ``mark`` has succeeded, and so have all earlier ones:
        a communicator runs them in order. :meth:`settle` need not wait for them again."""
        if mark:
            name = torch_private.default_group_name()
            self._waited_for[name] = max(mark, self._waited_for.get(name, 0))

    def _wait_on_stream(self, work: dist.Work) -> None:
        try:
            _wait_in_torch(work)
        except RuntimeError as error:
            self._note(error)
            raise

    def settle(self) -> None:
        """Return when all queued collectives have succeeded, else raise. Called before a step
        counts: results that were read since the last call are then valid."""
        for work in self._queued:
            self.finish_on_stream(work)
        self._queued.clear()
        if self._is_on_stream:
            self._finish_stream()
            self.raise_if_aborted()
        self.raise_failure()

    def _finish_stream(self) -> None:
        """Return when all collectives that the host has not waited for have ended."""
        counts = torch_private.collectives_of_groups()
        seen = self._waited_for
        if counts is not None and all(count <= seen.get(n, 0) for n, count in counts.items()):
            return
        self.raise_if_aborted()
        if self._record is not None:
            event = self._record()
            before = begin_stream_wait()
            try:
                self._wait_until(event.query)
            finally:
                end_stream_wait(before)
        self._waited_for = counts or {}

    def raise_failure(self) -> None:
        """Raise GroupAborted if a collective has failed, and the script has caught its error."""
        if self._failure:
            raise GroupAborted(f"the script caught the error of a collective: {self._failure}")

    @property
    def may_be_garbage(self) -> bool:
        """Whether results that the script reads may be invalid: the group was aborted, or the
        script has caught the error of a collective."""
        return bool(self._failure) or (self._is_on_stream and self._is_aborted)

    def _note(self, error: BaseException) -> None:
        """Record the error of a collective if it ends the world: only its text, since its frames
        would keep the group alive."""
        if not self._failure and is_world_fault(error):
            self._failure = str(error) or type(error).__name__

    def raise_if_aborted(self) -> None:
        """Raise GroupAborted if the group was aborted: results since then may be invalid."""
        if self._is_aborted:
            raise GroupAborted(_TAKEN_DOWN)

    # -- collectives with a callback ------------------------------------------------------------

    def start(self, work: dist.Work, done: Done) -> None:
        """Call ``done`` once, with the error or None, on any thread."""
        with self._lock:
            key, self._next = self._next, self._next + 1
            self._works[key] = work, done
            is_aborted = self._is_aborted
        work.get_future().add_done_callback(lambda future: self._ended(key, future))
        if is_aborted:
            self.abort()

    def _ended(self, key: int, future: Any) -> None:
        with self._lock:
            work, done = self._works.get(key, (None, None))
            if work is not None:
                self._works[key] = work, None
        if done is not None:
            done(_error_of(future))
        with self._lock:  # last: this gloo thread runs Python until here
            self._works.pop(key, None)

    def wait(self, work: dist.Work | None) -> None:
        """Return when the collective has succeeded; raise its error, or GroupAborted."""
        if work is None:  # this rank is not in the group
            return
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._ends_in_a_slice(work):
            return
        ended = threading.Event()
        errors: list[BaseException] = []

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            ended.set()

        self.start(work, done)
        before, long_wait = begin_host_wait(work), LongWait()
        try:
            while not ended.wait(WORKER_SLICE_S):
                long_wait.look()
        finally:
            end_wait(work, before)
        if errors:
            self._note(errors[0])
            raise errors[0]

    def _ends_in_a_slice(self, work: dist.Work) -> bool:
        """Whether the collective succeeds within one slice inside gloo. Training thread only.

        Most do, and a callback on a gloo thread costs 0.1 ms more CPU time; each slice that expires
        costs 0.2 ms, for an exception with a C++ stack trace [measured, torch 2.13].
        """
        if self._is_aborted:
            return False
        self._begun.append(work)  # until it returns
        before = begin_host_wait(work)
        try:
            _wait_in_torch(work, _GLOO_SLICE)
            has_ended = True
        except RuntimeError:  # the slice has expired, or it failed: its future has that error, too
            has_ended = False
        finally:
            end_wait(work, before)
        self._begun.remove(work)
        return has_ended

    def abort(self) -> None:
        """End all current and later waits. Thread-safe."""
        with self._lock:
            self._is_aborted = True
            waiting = [(key, done) for key, (_, done) in self._works.items() if done is not None]
            for key, _ in waiting:
                self._works[key] = self._works[key][0], None
        for _, done in waiting:
            done(GroupAborted(_TAKEN_DOWN))

    def drain(self, timeout_s: float) -> bool:
        """Whether every collective returns in time, successful or not."""
        deadline_s = SYSTEM_CLOCK.monotonic() + timeout_s
        while self._works or not all(work.is_completed() for work in self._begun):
            if SYSTEM_CLOCK.monotonic() > deadline_s:
                return False
            SYSTEM_CLOCK.sleep(DRAIN_SLICE_S)
        self._begun.clear()  # each keeps the group alive
        self._queued.clear()
        return True


# torch has one default group at a time, and a Work has no reference to its group. So code that
# has no group at hand (the patched Work.wait, DDP's reducer, collectives of this package) needs
# one place for the pending collectives of torch's default group. ProcessGroup owns them and stores
# them here; until then they belong to a group that the script has created.
_of_default_group = PendingWorks()


def pending_works() -> PendingWorks:
    """The pending collectives of torch's default group."""
    return _of_default_group


def open_works(
    semantics: Semantics = HOST,
    device: torch.device = _CPU,
    *,
    on_error: Callable[[], object] = lambda: None,
) -> PendingWorks:
    """Create an empty PendingWorks for a group that becomes torch's default group.

    The previous one stays as it was, aborted or not, for threads that still wait.
    """
    global _of_default_group
    is_on_stream, record = semantics.is_on_stream, semantics.record
    _of_default_group = works = PendingWorks(
        is_on_stream=is_on_stream,
        record=functools.partial(record, device) if record is not None else None,
        on_error=on_error,
    )
    describe_group(is_on_stream=is_on_stream)
    return works


def _error_of(future: Any) -> BaseException | None:
    try:
        future.value()
    except Exception as error:  # noqa: BLE001  passed on to the waiting thread
        return error.with_traceback(None)  # its frames hold the future, which holds the group
    return None
