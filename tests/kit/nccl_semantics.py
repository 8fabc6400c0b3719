"""A c10d backend for tests: NCCL's semantics, on CPU tensors.

The difficulties of recovery on GPUs result from the semantics of NCCL's collectives, not from the
GPUs. This backend (``nccl_semantics``) has the same semantics on a CPU. gloo transfers the data.
Each behaviour names its model; files are those of torch v2.13
(https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ for C++,
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/ for Python), and for its
ProcessGroupNCCL2 those of v2.15.

:mod:`kit.device_stream` simulates the device, and
:mod:`kit.nccl_operations` has the collectives.

:func:`register` registers it with torch and :mod:`elastic.groups.pending`;
:func:`use_by_default` makes it the backend of ``elastic.join()`` in this process.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic.groups.group import DEFAULT_BACKENDS, leak
from elastic.groups.pending import Semantics, register_semantics
from kit.device_stream import CPU, Kernels, poison, record, stream, synchronize
from kit.nccl_operations import (
    CoalescedPart,
    Exchange,
    Operations,
    wait_for_gloo,
)

NAME = "nccl_semantics"
SEMANTICS = Semantics(is_on_stream=True, synchronize=synchronize, record=record)
_LOOK_S = 0.0002
_NO_TIMEOUT = datetime.timedelta(0)
_in_torch = dist.Work.wait


@dataclass
class Control:
    """The tests' control of the backend. One per process: :data:`control`."""

    latency_s: float = 0.001  # from the end of the exchange until the output is written
    hang_in_abort: bool = False  # meanwhile, any work's ``is_completed`` blocks and holds the GIL
    # The network reports dead peers (``ncclCommGetAsyncError``); NVLink and shared memory do not.
    async_error: bool = False
    hang_in_build: bool = False
    failing_aborts: int = 0  # how many of the next ones raise
    # ProcessGroupNCCL2 (torch 2.15) has no _group_start and _group_end.
    is_nccl2: bool = field(default_factory=lambda: os.environ.get("NCCL_SEMANTICS") == "2")
    calls: list[str] = field(default_factory=list)  # calls that abort or coalesce, in order


control = Control()

_is_aborting = threading.Event()  # some communicator of this process


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """A future that is complete from the start, before its outputs are written.

    ProcessGroupNCCL.cpp, ``initWork`` and ``collective``: the future is marked completed when the
    collective is queued. Callbacks of ``then`` run on a stream that waits for the collective
    (ivalue_inl.h, ``Future::invokeCallback``), and ``wait`` makes the current stream wait; no
    thread is blocked.
    """

    def __init__(self, landed: threading.Event, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._landed = landed
        self.set_result(outputs)

    def then(self, callback: Callable[[Any], Any]) -> Any:
        stream.wait_for(self._landed)
        return super().then(callback)

    def wait(self) -> Any:
        stream.wait_for(self._landed)
        return super().wait()


class StreamWork(dist.Work):
    """A queued collective; its outputs are written later."""

    def __init__(
        self,
        outputs: list[torch.Tensor],
        exchange: Exchange,
        garbage: Callable[[], None] = lambda: None,
        *,
        is_barrier: bool = False,
        is_coalesced: bool = False,
        group: StreamGroup | None = None,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.garbage = garbage
        self.landed = threading.Event()
        self._outputs = outputs
        self._is_barrier = is_barrier
        self._is_coalesced = is_coalesced
        self._group = group
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::isCompleted``: whether the kernel has returned, or its
        communicator has an error. Kernels of an aborted one have returned; errors are not checked.

        Both checks take the mutex that ``NCCLComm::abort`` holds while it is in ``ncclCommAbort``
        (NCCLUtils.cpp), and the binding (init.cpp, ``is_completed``) keeps the interpreter lock.
        """
        _hold_the_interpreter_while(lambda: control.hang_in_abort and _is_aborting.is_set())
        if self._group is not None and not self._group.is_aborted and self._error is None:
            self._error = self._group.async_error
        return self._error is not None or self.landed.is_set()

    def exception(self) -> BaseException | None:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::checkAndSetException``: the last check's result."""
        return self._error

    def is_success(self) -> bool:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::isSuccess``."""
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::wait``: the stream waits, and the host only for
        barriers and with a timeout. NCCL's works are plain ``Work``, so a replacement of that
        class's ``wait`` is called."""
        replaced = dist.Work.wait
        if replaced is not _in_torch and not _is_called_from_below(sys._getframe(1)):
            return replaced(self, timeout)
        stream.wait_for(self.landed)
        if self._is_barrier:
            self.landed.wait()
        elif timeout != _NO_TIMEOUT and not self.landed.wait(timeout.total_seconds()):
            raise dist.DistBackendError("timed out in blocking wait")
        if self._error is not None and self._group is not None:
            # WorkNCCL::wait: "If exception is detected, throw it from the main CPU thread".
            self._group.abort_communicator()
            raise self._error
        return True

    def synchronize(self) -> None:
        stream.wait_for(self.landed)

    def get_future(self) -> Any:
        """ProcessGroupNCCL.cpp, ``endCoalescing``: a coalesced work has none; a null pointer is
        returned. nccl2/WorkNCCL.cpp, ``getFuture``: for a barrier, the caller waits and keeps the
        interpreter lock (init.cpp)."""
        if self._is_coalesced and not control.is_nccl2:
            raise SystemError("SIGSEGV: the future of a coalesced work is a null pointer")
        if self._is_barrier and control.is_nccl2:
            _hold_the_interpreter_while(lambda: not self.landed.is_set())
        return _Future(self.landed, self._outputs)

    def get_future_result(self) -> Any:
        """ProcessGroupNCCL.cpp, ``initWork``, and nccl2/WorkNCCL.cpp: always exists."""
        return torch.futures.Future()

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class StreamGroup(Operations):
    """A communicator: one thread runs its collectives, one after the other, behind the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""
        # With a device_id, the communicator is created here (``eagerConnectSingleDevice``): the
        # call blocks until all peers have joined, and no group exists yet that could be aborted.
        while control.hang_in_build:
            time.sleep(_LOOK_S)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        # From here on, only an abort ends a collective: a late peer must not look like a dead one.
        self._gloo._set_default_timeout(datetime.timedelta(days=1))
        self._aborted = threading.Event()
        self._queueing = threading.Lock()  # nothing is queued behind an abort
        self.async_error: BaseException | None = None  # of the communicator
        self._begun = 0
        self._works: queue.SimpleQueue[StreamWork | None] = queue.SimpleQueue()
        self._backend = _Backend2(self) if control.is_nccl2 else _Backend(self)
        self._thread = threading.Thread(target=self._run, name="nccl-semantics", daemon=True)
        self._thread.start()

    # -- the interface of any group -------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        """ProcessGroup.hpp, ``setGroupName``, keeps it in the backends of the group: in none."""
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        """Ignored: collectives wait until they are aborted."""

    def abort(self) -> None:
        """ProcessGroup.hpp, ``abort``: aborts all backends."""
        self._backend.abort()

    def shutdown(self) -> None:
        """ProcessGroupNCCL.cpp, ``shutdown``: queued collectives finish first."""
        self._works.put(None)
        self._thread.join()

    def _get_sequence_number_for_group(self) -> int:
        """ProcessGroupNCCL.cpp, ``getSequenceNumberForGroup``: counts all collectives, but not
        sends and receives."""
        return self._begun

    # -- coalescing -----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """ProcessGroupNCCL.cpp, ``startCoalescing``: the following calls become one operation."""
        control.calls.append("start coalescing")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:  # type: ignore[override]
        """ProcessGroupNCCL.cpp, ``endCoalescing``."""
        control.calls.append("end coalescing")
        parts, self._coalesced = self._coalesced or [], None
        return self._queue_all(parts, is_async=True, is_coalesced=True) if parts else None

    # -- collectives: see nccl_operations ---------------------------------------------------------

    def _queue(
        self,
        outputs: Sequence[torch.Tensor],
        exchange: Exchange,
        garbage: Callable[[], None] = lambda: None,
        *,
        is_barrier: bool = False,
        is_async: bool = True,
        is_collective: bool = True,
        is_coalesced: bool = False,
    ) -> dist.Work | None:
        """ProcessGroupNCCL.cpp, ``collective``: with ``asyncOp`` it runs on a separate stream and
        returns a work; otherwise it runs on the current stream and returns none: ``return asyncOp ?
        work : nullptr``. The host does not wait."""
        self._require_communicator()
        if self._coalesced is not None:
            self._coalesced.append(CoalescedPart(outputs, exchange, garbage))
            return None
        for output in outputs:
            poison(output)
        work = StreamWork(
            list(outputs),
            exchange,
            garbage,
            is_barrier=is_barrier,
            is_coalesced=is_coalesced,
            group=self,
        )
        with self._queueing:
            self._require_communicator()
            self._begun += is_collective
            self._works.put(work)
        if is_async:
            return work
        stream.wait_for(work.landed)
        return None

    def _require_communicator(self) -> None:
        """NCCLUtils.cpp, ``NCCLComm::getNcclComm``."""
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")

    # -- the stream's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            if not self._run_one(work):
                self._aborted.wait()  # a kernel that waits for a dead peer returns with an abort
                work.garbage()
            work.landed.set()

    def _run_one(self, work: StreamWork) -> bool:
        """Run a collective; returns whether its outputs were written."""
        if self._aborted.is_set():
            return False
        try:
            inner, land = work.exchange(self._gloo)
            while not inner.is_completed():
                if self._aborted.is_set():
                    leak(self._gloo)  # gloo's destructor may never return
                    return False
                time.sleep(_LOOK_S)
            wait_for_gloo(inner)
        except RuntimeError:  # a peer has died: the kernel waits for it
            if control.async_error and not self._aborted.is_set():
                self.async_error = dist.DistBackendError(
                    "NCCL error: remote process exited or there was a network error"
                )
            return False
        if self._aborted.wait(control.latency_s):
            return False
        land()
        return True

    def abort_communicator(self) -> None:
        """``ncclCommAbort``: kernels return with or without results, and nothing is raised. It can
        hang (pytorch issue 119797)."""
        if control.failing_aborts:
            control.failing_aborts -= 1
            raise dist.DistBackendError("NCCL error: the communicator could not be aborted")
        _is_aborting.set()
        while control.hang_in_abort:
            time.sleep(_LOOK_S)
        _is_aborting.clear()
        with self._queueing:
            self._aborted.set()
            self._works.put(None)

    @property
    def is_aborted(self) -> bool:
        """NCCLUtils.cpp, ``NCCLComm::isAborted``."""
        return self._aborted.is_set()


class _Backend2:
    """ProcessGroupNCCL2 (torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp, v2.15)."""

    supports_coalescing = True
    supports_splitting = False

    def __init__(self, group: StreamGroup) -> None:
        self._abort = group.abort_communicator

    def abort(self) -> None:
        control.calls.append("abort")
        self._abort()


class _Backend(_Backend2):
    """ProcessGroupNCCL (init.cpp, ``_group_start``)."""

    def _group_start(self) -> None:
        control.calls.append("group start")

    def _group_end(self) -> None:
        control.calls.append("group end")


def _hold_the_interpreter_while(is_stuck: Callable[[], bool]) -> None:
    """Block like C++ code that keeps the interpreter lock: no other Python thread runs."""
    while is_stuck():
        ctypes.PyDLL(None).sleep(3600)


def _is_called_from_below(frame: FrameType) -> bool:
    """Whether C++ is the caller, for the reducer or torch's own ``wait``. C++ has no frames: the
    next one belongs to the caller of C++."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(("elastic.groups.", "torch.nn.", "torch.autograd."))


@functools.cache  # once per process
def register() -> str:
    """Register the backend; returns its name."""
    dist.Backend.register_backend(NAME, StreamGroup, devices=["cpu"])
    # torch 2.15 attaches a flight recorder to groups whose backend has none, and cannot attach one
    # to a group in Python (distributed_c10d.py, _maybe_attach_flight_recorder).
    recorders: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add(NAME)
    register_semantics(NAME, SEMANTICS)
    return NAME


def use_by_default() -> None:
    """Make it the default backend of scripts. From now on, this thread's tensor operations run on
    the stream."""
    DEFAULT_BACKENDS["cpu"] = register()
    Kernels().__enter__()  # type: ignore[no-untyped-call]
