"""Collectives in flight, what their end means on each backend, and every patch of torch."""

from __future__ import annotations

import datetime
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastic import torch_private
from elastic.errors import SYSTEM_CLOCK, GroupAborted, TrainingError
from elastic.groups.faults import causes, is_world_fault
from elastic.hangs.page import COLLECTIVE, Flag, Phase, on_host, phases
from elastic.torch_private import not_compiled
from elastic.tuning.intervals import (
    LONG_WAIT_S,
    WORKER_SLICE_S,
)

# How often a drain is checked.
DRAIN_SLICE_S = 0.0005
# Length of one wait inside gloo. Each costs as much as a few lines of Python; an abort is noticed
# at its end, unless gloo reports it earlier.
GLOO_SLICE_MS = 20
# Polling interval for a collective that is queued on a device: within 1/50 of a millisecond a
# small collective ends.
STREAM_SLICE_S = 20e-6

# ----------------------------------------------------------------------------
# The meaning of a collective's work, by backend: done on the host, or queued on a device's stream.
#
# On gloo a work ends when its result is available, and raises the collective's error. On NCCL it
# is queued on a stream of the device, and the host runs ahead of it:
#
# - ``Work.wait()`` makes the current stream wait, not the host;
# - without ``async_op`` there is no work at all: the kernel is queued on the current stream
#   (``ProcessGroupNCCL::collective`` ends in ``return asyncOp ? work : nullptr``);
# - the work's future is complete from the start (``ProcessGroupNCCL::initWork``), so its callback
#   implies nothing about results;
# - an abort makes the kernels return: the work is complete, nothing is raised, and its output
#   holds whatever was reduced by then.
#
# (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: ``WorkNCCL::wait``, ``WorkNCCL::isCompleted``;
# docs/decisions/0022.) Code that needs a result checks :func:`semantics_of`.


class StreamEvent(Protocol):
    """A point in a stream's queue. ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether everything that was queued before it is done."""


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """How results of a backend become visible to the host."""

    is_on_stream: bool
    # Blocks until everything that the device's current stream waits for is done.
    synchronize: Callable[[torch.device], None]
    # Records an event at that point, for callers that must not block. None if nothing is queued.
    record: Callable[[torch.device], StreamEvent] | None = None


def _synchronize_current_stream(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


def _record_on_current_stream(device: torch.device) -> StreamEvent:
    event: StreamEvent = torch.cuda.current_stream(device).record_event()
    return event


def _synchronize_host(device: torch.device) -> None:
    """gloo copies results to a GPU on its own streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


HOST = Semantics(is_on_stream=False, synchronize=_synchronize_host)
_CUDA = Semantics(
    is_on_stream=True, synchronize=_synchronize_current_stream, record=_record_on_current_stream
)

_BY_BACKEND: dict[str, Semantics] = {
    "gloo": HOST,
    "mpi": HOST,
    "nccl": _CUDA,
    # torch 2.14 and later (distributed_c10d.py, _register_builtin_nccl_legacy_backend and below).
    "nccl-legacy": _CUDA,
    "nccl2": _CUDA,
    "nccl-lazy": _CUDA,
}


def register_semantics(backend: str, semantics: Semantics) -> None:
    """Register the semantics of a backend that is not part of torch."""
    _BY_BACKEND[backend.lower()] = semantics


def semantics_of(device_type: str, backend: str | None = None) -> Semantics:
    """The semantics of collectives on tensors of this device type.

    ``backend``: as in ``init_process_group``, for example ``cpu:gloo,cuda:nccl``; by default the
    backend of the current group.

    >>> semantics_of("cpu", "cpu:gloo,cuda:nccl").is_on_stream
    False
    >>> semantics_of("cuda", "nccl").is_on_stream
    True
    """
    name = backend_of(device_type, backend or str(dist.get_backend_config()))
    default = HOST if device_type == "cpu" else _CUDA
    return _BY_BACKEND.get(name, default)


def has_streams(device_type: str, backend: str) -> bool:
    """Whether a group of this backend queues anything on a stream."""
    return semantics_of(device_type, backend).is_on_stream


def is_of_nccl(work: Any) -> bool:
    """Whether a collective is queued on a stream by one of torch's NCCL backends.

    Their works, and no others, have a second future: the outcome (``WorkNCCL::getFutureResult``).
    Requesting the first one can crash the process: after coalesced operations, including
    ``batch_isend_irecv`` and an uneven ``all_gather``, it is a null pointer (ProcessGroupNCCL.cpp,
    ``endCoalescing`` creates none), and ``Future.done`` ends in SIGSEGV. On ProcessGroupNCCL2, the
    request after a barrier waits for the device and holds the interpreter lock
    (nccl2/WorkNCCL.cpp, ``getFuture``).
    """
    try:
        work.get_future_result()
    except RuntimeError:
        return False
    return True


def backend_of(device_type: str, backend: str) -> str:
    """The lower-case name of the backend for a device type; empty if there is none.

    >>> backend_of("cuda", "cpu:gloo,cuda:nccl")
    'nccl'
    """
    by_device = dict(part.split(":", 1) for part in backend.lower().split(",") if ":" in part)
    return by_device.get(device_type, "") if by_device else backend.lower()


# ----------------------------------------------------------------------------
# Records, on the worker's page, the collective in which the main thread waits for other ranks.

_UNKNOWN_OPERATION = -1
_SUBGROUPS = int(Flag.SUBGROUPS)  # flag enums are slow to combine, and every wait does it


@not_compiled
def begin_wait(work: dist.Work | None) -> Phase:
    """Record that the main thread waits for ``work``; return the argument for :func:`end_wait`."""
    if work is None or not phases.is_on:
        return COLLECTIVE
    return _begin_wait(torch_private.operation_of(work))


@not_compiled
def begin_host_wait(work: dist.Work | None) -> Phase:
    """The same for a collective of the host, in a group that may have others on a device."""
    if work is None or not phases.is_on:
        return COLLECTIVE
    return _begin_wait(on_host(torch_private.operation_of(work)))


def _begin_wait(operation: int) -> Phase:
    if torch_private.has_subgroups():
        phases.set_flag(_SUBGROUPS, True)
    return phases.begin_wait(torch_private.collectives_begun(), operation)


@not_compiled
def end_wait(work: dist.Work | None, before: Phase) -> None:
    """Record that the wait for ``work`` is over, successful or not."""
    if work is not None:
        phases.end_wait(before)


@not_compiled
def begin_stream_wait() -> Phase:
    """Record that the main thread waits for operations queued on a device; return the argument
    for :func:`end_stream_wait`."""
    if not phases.is_on:
        return COLLECTIVE
    return phases.begin_wait(torch_private.collectives_begun(), _UNKNOWN_OPERATION)


@not_compiled
def end_stream_wait(before: Phase) -> None:
    """Record that the wait is over, successful or not."""
    phases.end_wait(before)


@not_compiled
def queued() -> None:
    """Record that a collective is queued on a device, and the host continues."""
    if phases.is_on:
        phases.queued(torch_private.collectives_begun())


@contextmanager
def waits_for_ranks() -> Iterator[None]:
    """The body waits for other ranks outside of any collective."""
    before = begin_stream_wait()
    try:
        yield
    finally:
        end_stream_wait(before)


def report_collectives() -> None:
    """Record how many collectives have begun, waited for or not. Thread-safe."""
    if phases.is_on:
        phases.begun(torch_private.collectives_begun())


def describe_group(*, is_on_stream: bool) -> None:
    """Record whether the new group's collectives are queued on a stream."""
    phases.set_flag(Flag.ON_STREAM, is_on_stream)


_in_long_waits: Callable[[], object] | None = None


def call_in_long_waits(call: Callable[[], object]) -> None:
    """Call this function while the main thread waits long for a collective, periodically, on that
    thread: its errors end the wait."""
    global _in_long_waits
    _in_long_waits = call


class LongWait:
    """A wait for a collective that may take long."""

    def __init__(self) -> None:
        self._next_s = SYSTEM_CLOCK.monotonic() + LONG_WAIT_S

    def look(self) -> None:
        """Call the function if it is due. Called repeatedly in the wait."""
        if (now_s := SYSTEM_CLOCK.monotonic()) < self._next_s:
            return
        self._next_s = now_s + LONG_WAIT_S
        if _in_long_waits and threading.current_thread() is threading.main_thread():
            _in_long_waits()


# ----------------------------------------------------------------------------
# Collectives in flight, and how a thread stops waiting for them.
#
# When a connection ends, gloo drops its queued sends without an error: it passes the error only to
# the older kind of buffer, which collectives do not use (gloo, transport/tcp/pair.cc,
# ``Pair::signalException``). A wait for such a send lasts until the group's timeout, half an hour,
# and nothing can release it: in 150 aborts of a small all-reduce at random moments several ranks
# hung [measured, torch 2.13]. The death of a peer has the same effect.
#
# So no thread blocks inside gloo. Threads wait here, for the collective or for the end of the
# group; a group whose collectives do not return is leaked, not destroyed.
#
# When a group is aborted, its collectives on a stream
# return as if they had succeeded. The abort is recorded first, so a check here after a collective
# has ended shows whether its result is valid. A synchronous call (``dist.all_reduce(t)``) has no
# work to check: NCCL runs it on the current stream and returns nothing. So groups count the
# collectives that they begin. If more have begun than were waited for,
# :meth:`PendingWorks.synchronize` waits for the stream.
#
# While ``ncclCommAbort`` hangs, every query of a work hangs too, and holds the interpreter lock
# (NCCLUtils.cpp: ``NCCLComm::abort`` and ``isAborted`` take the same mutex). So the flag is
# checked first.
#
# A script may catch the error of a collective (`except RuntimeError: continue`). So errors that
# end the world are recorded here, and raised again at the end of the step.

_GLOO_SLICE = datetime.timedelta(milliseconds=GLOO_SLICE_MS)
_wait_in_torch_pending = dist.Work.wait  # before elastic/groups/pending.py replaces it
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
                _wait_in_torch_pending(work, _GLOO_SLICE)
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
        only if :meth:`synchronize` returns. Raises the collective's error, or GroupAborted."""
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
        a communicator runs them in order. :meth:`synchronize` need not wait for them again."""
        if mark:
            name = torch_private.default_group_name()
            self._waited_for[name] = max(mark, self._waited_for.get(name, 0))

    def _wait_on_stream(self, work: dist.Work) -> None:
        try:
            _wait_in_torch_pending(work)
        except RuntimeError as error:
            self._note(error)
            raise

    def synchronize(self) -> None:
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
            _wait_in_torch_pending(work, _GLOO_SLICE)
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


# ----------------------------------------------------------------------------
# Process groups and handles of collectives that the script keeps beyond the end of their world.
#
# Their sockets are closed, so a collective fails like one whose peer has died: the next world
# would fail in the same place, and so on.

_OF_TORCH_STALE_GROUPS = "torch.distributed"
_HINT = """\
create groups again in each world, in the function that run.retry calls, and keep them in its
      local variables; or in a callback, which is called in each world:
      run.on_world(lambda world: groups.update(pair=dist.new_group([0, 1])))
      groups of a mesh are those of run.mesh, or of the mesh that the function of run.build gets"""

_failed: weakref.WeakKeyDictionary[dist.Work, weakref.ref[object]] = weakref.WeakKeyDictionary()
_ended: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def have_ended(groups: Iterable[dist.ProcessGroup], where: str) -> None:
    """Note that the world of these groups has ended. ``where`` they were created: "in generation
    1"."""
    for group in groups:
        _ended[group] = where


def uses_stale_group(error: BaseException) -> bool:
    """Whether the error was raised in a collective of a group whose world has ended."""
    return next(_used(error), None) is not None


def refuse_stale_group(error: BaseException) -> None:
    """Raise TrainingError, with the group and the script's line, if the error was raised in a
    collective of a group whose world has ended."""
    for group in _used(error):
        raise TrainingError(
            f"{_line_of(error)} uses a process group of {group.size()} ranks that was created "
            f"{_ended[group]}: that world has ended",
            hint=_HINT,
        ) from error


def refuse_stale_handle(work: dist.Work, world: object) -> None:
    """Raise TrainingError if a wait for this collective has failed in another world before."""
    failed_in = _failed.get(work)
    if failed_in is not None and failed_in() is not world:
        raise TrainingError(
            "work.wait() of a collective that has failed in an earlier world, which has ended",
            hint="do not keep handles of async_op=True in attributes or globals: wait for each in "
            "the function that run.retry calls, in its local variables",
        )


def handle_failed(work: dist.Work, world: object) -> None:
    """Note that a wait for this collective has failed. ``world``: any object that lives as long."""
    _failed[work] = weakref.ref(world)


def _used(error: BaseException) -> Iterator[dist.ProcessGroup]:
    for cause in causes(error) if _ended else ():
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if str(frame.f_globals.get("__name__", "")).startswith(_OF_TORCH_STALE_GROUPS):
                for value in frame.f_locals.values():
                    if isinstance(value, dist.ProcessGroup) and value in _ended:
                        yield value


def _line_of(error: BaseException) -> str:
    """The last line of the script on the way to the error."""
    line = "the script"
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "elastic"):
            line = f"{frame.f_code.co_filename}:{number}"
    return line


# ----------------------------------------------------------------------------
# Every change that this package makes to torch at run time: why, and how it is undone.
#
# Importing this module changes nothing. :class:`elastic.groups.group.ProcessGroup` applies
# changes when it builds a group, and undoes them when it destroys the last one.
#
# ``Work.wait`` ``dist.all_reduce(loss)`` waits inside gloo, where nothing can reliably release it
# (see :class:`PendingWorks`). On gloo all synchronous collectives end in
# ``Work.wait`` (``work.wait()`` at the end of each function in
# torch/distributed/distributed_c10d.py): only there can an abort end those of the script. On NCCL
# synchronous collectives have no work (ProcessGroupNCCL.cpp, the end of ``collective``), and waits
# for the others do not block the host, only the stream: nothing has to be released. Results count
# if ``ProcessGroup.synchronize`` returns at the end of the step; it waits for all collectives that
# the groups have begun. A process group of our own, registered with c10d, would not need this
# patch; docs/decisions/0027 describes its cost.
#
# the process group of DDP's reducer
#     The reducer waits for futures in C++, where Python code cannot raise
#     (torch/csrc/distributed/c10d/reducer.cpp, ``finalize_backward``, ``sync_bucket_indices``).
#     ``Reducer._update_process_group`` gives it another group; DistributedDataParallel has it for
#     worlds that shrink (torch/nn/parallel/distributed.py, ``_update_process_group``). The first
#     group is not restored: the reducer and its hooks are discarded with the world.
#
# ``sys.excepthook``
#     Each call of ``init_process_group`` wraps it in another hook that prefixes the rank
#     (torch/distributed/distributed_c10d.py, ``_distributed_excepthook``).
#
# ``distributed_c10d._world.group_count``
#     A counter names the default groups (distributed_c10d.py, ``_process_group_name``), and a
#     failed build increments it: the names of the next group would differ between this rank and a
#     joining node, and they would never find each other in the store.
#
# ``torch.autograd._engine_run_backward`` Gradients are reduced, and hangs judged, by backward
# pass; torch has hooks for the tensors of a pass, but none for its beginning and its end.
# ``backward()`` calls this function of torch/autograd/__init__.py. Permanent, from the first
# wrapped or built model on (:func:`elastic.torch_private.watch_backward`).
#
# ``init_process_group``, ``destroy_process_group``, ``new_group``, ``barrier``
#     In all modules, from elastic.join() to the end of the last world: the group of a world is
#     created here, after frameworks want it (:mod:`elastic.groups.deferred`).
#
# The environment of ProcessGroupNCCL is changed in :mod:`elastic.groups.group`.
# Two permanent changes outside torch are made elsewhere: ``sys.excepthook`` reports the error that
# ends a worker (:mod:`elastic.groups.faults`), and ``pdb.Pdb.interaction`` marks a worker whose
# debugger waits for input (:mod:`elastic.hangs.page`). ``REPLACED`` in
# ``tests/contract/test_torch_private_names.py`` lists all changes; that test rejects any other.

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_NO_TIMEOUT = datetime.timedelta(0)
_in_torch: Callable[[dist.Work, datetime.timedelta], bool] = dist.Work.wait
# The object in the class's dictionary: it binds self, and dist.Work.wait does not.
_OF_TORCH_PATCHES = vars(dist.Work)["wait"]


# Work.wait -----------------------------------------------------------------------------------


def release_waits() -> None:
    """Make an abort end all waits for collectives in this process. Idempotent."""
    dist.Work.wait = _wait  # type: ignore[method-assign, assignment]


def restore_waits() -> None:
    """Restore torch's waits, unless other code has replaced ours. Idempotent."""
    if dist.Work.wait is _wait:
        dist.Work.wait = _OF_TORCH_PATCHES  # type: ignore[method-assign]


def _wait(work: dist.Work, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
    """Like torch's: True, or raises the error; GroupAborted once the world is over."""
    world = pending_works()
    refuse_stale_handle(work, world)
    try:
        return _wait_interruptibly(work, timeout)
    except Exception:
        handle_failed(work, world)
        raise


def _wait_interruptibly(work: dist.Work, timeout: datetime.timedelta) -> bool:
    if timeout != _NO_TIMEOUT:
        return _wait_in_torch_patches(work, timeout)  # it ends by itself
    if is_of_nccl(work):  # its future may be a null pointer
        pending_works().queue(work)
        return True
    try:
        future = work.get_future()
    except RuntimeError:  # sends and receives have none
        return _wait_in_torch_patches(work, timeout)
    if future.done():
        pending_works().queue(work)
    else:
        pending_works().wait(work)
    return True


def _wait_in_torch_patches(work: dist.Work, timeout: datetime.timedelta) -> bool:
    before = begin_wait(work)
    try:
        return _in_torch(work, timeout)
    finally:
        end_wait(work, before)


# DDP's reducer -------------------------------------------------------------------------------


def replace_reducer_group(reducer: Any, group: dist.ProcessGroup) -> None:
    """Make DDP's reducer use ``group`` for its collectives, without keeping ``group`` alive."""
    torch_private.give_group(reducer, group)


def remove_reducer_hooks(reducer: Any) -> None:
    """Remove a reducer's hooks from the parameters before it is discarded: the next DDP with the
    same parameters would call the old hooks, too."""
    torch_private.remove_hooks(reducer)


# Side effects of init_process_group ----------------------------------------------------------


class TorchExceptHook:
    """The wrapper of ``sys.excepthook`` by ``init_process_group``. Create it before that call."""

    def __init__(self) -> None:
        self._before: ExceptHook = sys.excepthook
        self._of_torch: ExceptHook = sys.excepthook

    def installed(self) -> None:
        """Call this once the group is initialised and torch's hook is in place."""
        self._of_torch = sys.excepthook

    def remove(self) -> None:
        """Restore the previous hook, unless another one was installed after torch's."""
        if sys.excepthook is self._of_torch:
            sys.excepthook = self._before


def reset_group_count() -> None:
    """Name the next default group like the first: all ranks must use the same name."""
    torch_private.forget_group_count()
