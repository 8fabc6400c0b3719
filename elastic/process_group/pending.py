"""Collectives that are under way, and how a thread stops waiting for them.

gloo forgets a send that is queued when its connection ends: its list of sends is told of the
error only for the older kind of buffer, which collectives do not use (gloo, transport/tcp/pair.cc,
``Pair::signalException``). A wait for it lasts until the group's timeout, half an hour, and
nothing can release it: in 150 aborts of a small all-reduce at random moments several ranks hung
[measured, torch 2.13]. Natural deaths of peers do it, too.

So no thread blocks inside gloo. It waits here, for the collective or for the end of the
group; a group whose collectives do not return is leaked, not destroyed.

Collectives on a stream (:mod:`elastic.process_group.semantics`) come back when their group is
aborted, as if they had ended well. That it is aborted is noted before that happens, so whoever
looks here after a collective has ended knows whether its result is one. Where the script waits for
none (``dist.all_reduce(t)``), there is no work to look at: NCCL runs it on the current stream and
returns nothing. Groups count what they begin, and :meth:`PendingWorks.settle` waits for the stream
where they have begun more than was waited for.

While ``ncclCommAbort`` hangs, every look at a work does, with the interpreter lock held
(NCCLUtils.cpp: ``NCCLComm::abort`` and ``isAborted`` take the same mutex). So the flag comes first.

A script may catch the error of a collective (`except RuntimeError: continue`) and go on. So errors
that end the world are noted here, and raised again at the end of the step.
"""

from __future__ import annotations

import ctypes
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

    ``is_on_stream``: what the group does may be queued on a device. ``record``: an event behind
    all that is queued there by now. ``on_error``: aborts the group.
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
        self._begun: list[dist.Work] = []  # of the thread that trains
        self._queued: list[dist.Work] = []  # on a stream, by the thread that trains
        self._is_aborted = False
        self._is_on_stream = is_on_stream
        self._record = record
        self._on_error = on_error
        self._waited_for: dict[str, int] = {}  # by group, how many collectives
        self._failure = ""  # of the first collective that has shown that the world is over

    def begin(self, work: dist.Work) -> None:
        """A collective on the CPU, for :meth:`finish` or :meth:`finish_one`. Of the thread that
        trains.

        Cheaper than :meth:`start`: no thread of gloo's has to run Python. What is begun and never
        finished, because another one has failed, is under way for :meth:`drain`.
        """
        self._begun.append(work)

    def finish(self) -> None:
        """Return when all that was begun has ended well; raise what went wrong, or GroupAborted."""
        if not self._begun:
            return
        last = self._begun[-1]
        before = begin_wait(last)
        try:
            for work in self._begun:
                self._wait_in_slices(work)
        finally:
            end_wait(last, before)
        self._begun.clear()

    def finish_one(self, work: dist.Work) -> None:
        """As :meth:`finish`, of this one only."""
        if not any(work is begun for begun in self._begun):
            self._begun.append(work)  # until it comes back
        before = begin_wait(work)
        try:
            self._wait_in_slices(work)
        finally:
            end_wait(work, before)
        self._begun.remove(work)

    def _wait_in_slices(self, work: dist.Work) -> None:
        has_ended = False
        while True:
            if self._is_aborted and not (has_ended or work.is_completed()):
                self._note(aborted := GroupAborted(_TAKEN_DOWN))
                raise aborted
            try:
                _wait_in_torch(work, _GLOO_SLICE)
                return
            except RuntimeError as error:  # of the collective, or the slice is over
                if has_ended:
                    self._note(error)
                    raise
                has_ended = work.is_completed()

    # -- collectives on a stream ----------------------------------------------------------------

    def queue(self, work: dist.Work) -> None:
        """Make the current stream wait for a collective; the host continues. What is done with its
        result counts only if :meth:`settle` returns. Raises what went wrong, or GroupAborted."""
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
        """Return when the collective has ended well, and the current stream was made to wait for
        it; raise what went wrong, or GroupAborted.

        ``Work.wait`` raises what went wrong with one that has ended. ``Work.is_success`` would
        say it without that, but is not implemented on NCCL (ProcessGroupNCCL.cpp,
        ``WorkNCCL::isSuccess``). An abort is no error there, so it is asked for last: it is noted
        before the first collective ends of it.
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
        while True:
            self.raise_if_aborted()
            if is_done():
                return
            SYSTEM_CLOCK.sleep(STREAM_SLICE_S)

    def _raise_error_of(self, work: dist.Work) -> None:
        """Raise what torch has noticed of it by itself, once the group is being aborted: from then
        on no other collective of the group counts."""
        error = torch_private.error_of(work)
        if error is not None:
            self._on_error()
            self._note(error)
            raise error

    def mark(self) -> int:
        """How many collectives the default group has begun, for :meth:`covered`. Of the thread
        that begins them, right after one that is waited for later."""
        return torch_private.collectives_begun() if self._is_on_stream else 0

    def covered(self, mark: int) -> None:
        """The collective before ``mark`` has ended well, and so have all before it: a communicator
        runs them one after the other. :meth:`settle` need not wait for them again."""
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
        """Return when everything that was queued has ended well, else raise. Before a step counts:
        whatever the script has read of results since the last one was a result."""
        for work in self._queued:
            self.finish_on_stream(work)
        self._queued.clear()
        if self._is_on_stream:
            self._finish_stream()
            self.raise_if_aborted()
        self.raise_failure()

    def _finish_stream(self) -> None:
        """Return when all collectives have ended that nobody has waited for on the host."""
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
            raise GroupAborted(f"the script has caught the error of a collective: {self._failure}")

    @property
    def may_be_garbage(self) -> bool:
        """Whether what the script reads of results may be none: they came of an abort, or it has
        caught the error of the collective."""
        return bool(self._failure) or (self._is_on_stream and self._is_aborted)

    def _note(self, error: BaseException) -> None:
        """A collective has failed. Kept is the text of an error that ends the world: its frames
        would hold the group."""
        if not self._failure and is_world_fault(error):
            self._failure = str(error) or type(error).__name__

    def raise_if_aborted(self) -> None:
        """Raise GroupAborted if the group was taken down: what has ended since may be no result."""
        if self._is_aborted:
            raise GroupAborted(_TAKEN_DOWN)

    # -- collectives with a callback ------------------------------------------------------------

    def start(self, work: dist.Work, done: Done) -> None:
        """Call ``done`` once, with what went wrong or None, on whatever thread finds out."""
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
        with self._lock:  # last: this thread is one of gloo's, and in Python until here
            self._works.pop(key, None)

    def wait(self, work: dist.Work | None) -> None:
        """Return when the collective has ended well; raise what went wrong, or GroupAborted."""
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
        before = begin_wait(work)
        try:
            while not ended.wait(WORKER_SLICE_S):
                pass
        finally:
            end_wait(work, before)
        if errors:
            self._note(errors[0])
            raise errors[0]

    def _ends_in_a_slice(self, work: dist.Work) -> bool:
        """Whether the collective ends well within one slice inside gloo. Of the thread that trains.

        Most do, and a callback in a thread of gloo's costs 0.1 ms of CPU more; each slice that
        expires costs 0.2 ms, for an exception with the stack of C++ [measured, torch 2.13].
        """
        if self._is_aborted:
            return False
        self._begun.append(work)  # until it comes back
        before = begin_wait(work)
        try:
            _wait_in_torch(work, _GLOO_SLICE)
            has_ended = True
        except RuntimeError:  # the slice is over, or it went wrong: its future has that, too
            has_ended = False
        finally:
            end_wait(work, before)
        self._begun.remove(work)
        return has_ended

    def abort(self) -> None:
        """End all waits, now and later; from any thread."""
        with self._lock:
            self._is_aborted = True
            waiting = [(key, done) for key, (_, done) in self._works.items() if done is not None]
            for key, _ in waiting:
                self._works[key] = self._works[key][0], None
        for _, done in waiting:
            done(GroupAborted(_TAKEN_DOWN))

    def drain(self, timeout_s: float) -> bool:
        """Whether every collective comes back in time, well or not."""
        deadline_s = SYSTEM_CLOCK.monotonic() + timeout_s
        while self._works or not all(work.is_completed() for work in self._begun):
            if SYSTEM_CLOCK.monotonic() > deadline_s:
                return False
            SYSTEM_CLOCK.sleep(DRAIN_SLICE_S)
        self._begun.clear()  # each holds the group
        self._queued.clear()
        return True


# torch has one default group at a time, and a Work has no reference to its group. So what
# is called without a group at hand (the patched Work.wait, DDP's reducer, collectives of this
# package) needs one place where the works of torch's default group are. ProcessGroup owns them
# and puts them here; until then they are those of a group that the script has made itself.
_of_default_group = PendingWorks()


def pending_works() -> PendingWorks:
    """The works of torch's default group."""
    return _of_default_group


def open_works(
    semantics: Semantics = HOST,
    device: torch.device = _CPU,
    *,
    on_error: Callable[[], object] = lambda: None,
) -> PendingWorks:
    """The works of a group that becomes torch's default group: none yet.

    Those of the last one stay as they were, aborted or not, for threads that still wait.
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
        return error.with_traceback(None)  # its frames hold the future, and that the group
    return None


def leak(group: object) -> None:
    """Never run the group's destructor, not even at exit: it would join a thread that is stuck.

    What is lost are two threads and a few descriptors, until the group's timeout ends them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
