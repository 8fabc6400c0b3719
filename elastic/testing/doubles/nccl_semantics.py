"""A c10d backend for tests: NCCL's semantics, on CPU tensors.

What recovery has to cope with on GPUs comes from how NCCL's collectives behave, not from GPUs. This
backend (``nccl_semantics``) behaves like that where everything else runs on a CPU. gloo moves the
data underneath. Each behaviour names what it imitates; files are those of torch v2.13
(https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ for C++,
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/ for Python), and for its
ProcessGroupNCCL2 those of v2.15.

The device is simulated in :mod:`elastic.testing.doubles.device_stream`; what each collective does
is in :mod:`elastic.testing.doubles.nccl_operations`.

:func:`register` makes it known to torch and to :mod:`elastic.process_group.semantics`;
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

from elastic.process_group import (
    DEFAULT_BACKENDS,
    Semantics,
    leak,
    register_semantics,
)
from elastic.testing.doubles.device_stream import (
    CPU,
    Kernels,
    poison,
    record,
    stream,
    synchronize,
)
from elastic.testing.doubles.nccl_operations import (
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

    # From the end of the exchange until the result is in the output.
    latency_s: float = 0.001
    # While it hangs, ``is_completed`` of any work blocks, with the interpreter lock.
    hang_in_abort: bool = False
    # The network reports dead peers (``ncclCommGetAsyncError``); over NVLink and shared memory
    # nothing does.
    async_error: bool = False
    hang_in_build: bool = False
    # ProcessGroupNCCL2 (torch 2.15) has no _group_start and _group_end.
    is_nccl2: bool = field(default_factory=lambda: os.environ.get("NCCL_SEMANTICS") == "2")
    calls: list[str] = field(default_factory=list)  # of what aborts


control = Control()

_is_aborting = threading.Event()  # some communicator of this process


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """Complete from the start, with outputs that are not there yet.

    ProcessGroupNCCL.cpp, ``initWork`` and ``collective``: the future is marked completed when the
    collective is queued. What is chained to it by ``then`` runs on a stream that waits for the
    collective (ivalue_inl.h, ``Future::invokeCallback``), and so does who waits for the result; a
    done callback blocks no thread.
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
    """A collective that is queued; its result lands later."""

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
        communicator has an error. Of an aborted one kernels have, and errors are not looked for.

        Both looks take the mutex that ``NCCLComm::abort`` holds while it is in ``ncclCommAbort``
        (NCCLUtils.cpp), and the binding (init.cpp, ``is_completed``) keeps the interpreter lock.
        """
        _hold_the_interpreter_while(lambda: control.hang_in_abort and _is_aborting.is_set())
        if self._group is not None and not self._group.is_aborted and self._error is None:
            self._error = self._group.async_error
        return self._error is not None or self.landed.is_set()

    def exception(self) -> BaseException | None:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::checkAndSetException``: what the last look found."""
        return self._error

    def is_success(self) -> bool:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::isSuccess``."""
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::wait``: the stream waits, not the host, but for
        barriers and where a timeout is given. Works of NCCL are plain ``Work``: whoever replaces
        that class's ``wait`` is called."""
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
        """ProcessGroupNCCL.cpp, ``endCoalescing``: there is none, and a null pointer is returned.
        nccl2/WorkNCCL.cpp, ``getFuture``: who asks waits for a barrier, with the interpreter lock
        (init.cpp)."""
        if self._is_coalesced and not control.is_nccl2:
            raise SystemError("SIGSEGV: the future of a coalesced work is a null pointer")
        if self._is_barrier and control.is_nccl2:
            _hold_the_interpreter_while(lambda: not self.landed.is_set())
        return _Future(self.landed, self._outputs)

    def get_future_result(self) -> Any:
        """ProcessGroupNCCL.cpp, ``initWork``, and nccl2/WorkNCCL.cpp: always there."""
        return torch.futures.Future()

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class StreamGroup(Operations):
    """A communicator: one thread runs its collectives, one after the other, behind the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""
        # With a device_id the communicator is made in here (``eagerConnectSingleDevice``): the
        # call blocks until all peers have come, and there is no group yet that could be aborted.
        while control.hang_in_build:
            time.sleep(_LOOK_S)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._aborted = threading.Event()
        self.async_error: BaseException | None = None  # of the communicator
        self._begun = 0
        self._works: queue.SimpleQueue[StreamWork | None] = queue.SimpleQueue()
        self._backend = _Backend2(self) if control.is_nccl2 else _Backend(self)
        self._thread = threading.Thread(target=self._run, name="nccl-semantics", daemon=True)
        self._thread.start()

    # -- what torch and the product ask of any group --------------------------------------------

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
        """Of collectives: they wait until they are aborted."""

    def abort(self) -> None:
        """ProcessGroup.hpp, ``abort``: of all backends."""
        self._backend.abort()

    def shutdown(self) -> None:
        """ProcessGroupNCCL.cpp, ``shutdown``: what is queued runs to its end before."""
        self._works.put(None)
        self._thread.join()

    def _get_sequence_number_for_group(self) -> int:
        """ProcessGroupNCCL.cpp, ``getSequenceNumberForGroup``: of collectives, however they were
        begun; sends and receives are not counted."""
        return self._begun

    # -- coalescing -----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """ProcessGroupNCCL.cpp, ``startCoalescing``: what follows is one operation."""
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
        """ProcessGroupNCCL.cpp, ``collective``: with ``asyncOp`` it runs on a stream of its own,
        and there is a work; without, on the current one, and there is none: ``return asyncOp ? work
        : nullptr``. Nothing waits on the host."""
        if self._aborted.is_set():  # NCCLUtils.cpp, ``NCCLComm::getNcclComm``
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
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
        self._begun += is_collective
        self._works.put(work)
        if is_async:
            return work
        stream.wait_for(work.landed)
        return None

    # -- the stream's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            if not self._run_one(work):
                self._aborted.wait()  # a kernel that waits for a dead peer returns with an abort
                work.garbage()
            work.landed.set()

    def _run_one(self, work: StreamWork) -> bool:
        """Whether the result is there."""
        if self._aborted.is_set():
            return False
        try:
            inner, land = work.exchange(self._gloo)
            while not inner.is_completed():
                if self._aborted.is_set():
                    leak(self._gloo)  # gloo may never give it back
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
        """``ncclCommAbort``: kernels return, whatever has become of their results, and nothing is
        raised. It can hang (pytorch issue 119797)."""
        _is_aborting.set()
        while control.hang_in_abort:
            time.sleep(_LOOK_S)
        _is_aborting.clear()
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
    """Block as C++ does that keeps the interpreter lock: no other thread of Python's runs."""
    while is_stuck():
        ctypes.PyDLL(None).sleep(3600)


def _is_called_from_below(frame: FrameType) -> bool:
    """Whether C++ calls, for the reducer or for who has called torch's own ``wait``. C++ has no
    frames: the next one is that of who has called it."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(("elastic.process_group.", "torch.nn.", "torch.autograd."))


@functools.cache  # once per process
def register() -> str:
    """Make the backend known; its name."""
    dist.Backend.register_backend(NAME, StreamGroup, devices=["cpu"])
    # torch 2.15 attaches a flight recorder to groups whose backend has none, and cannot attach one
    # to a group in Python (distributed_c10d.py, _maybe_attach_flight_recorder).
    recorders: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add(NAME)
    register_semantics(NAME, SEMANTICS)
    return NAME


def use_by_default() -> None:
    """Scripts that do not choose a backend train on this one. What this thread does with tensors
    runs on the stream from now on."""
    DEFAULT_BACKENDS["cpu"] = register()
    Kernels().__enter__()  # type: ignore[no-untyped-call]
