"""A c10d backend for tests: NCCL's semantics, on CPU tensors.

What recovery has to cope with on GPUs comes from how NCCL's collectives behave, not from GPUs. This
backend (``nccl_semantics``) behaves like that where everything else runs on a CPU. gloo moves the
data underneath. Each behaviour names what it imitates; files are those of torch v2.13
(https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ for C++,
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/ for Python), and for its
ProcessGroupNCCL2 those of v2.15.

The host simulates the device: an operation on a tensor is what a kernel on the current stream
would be, and runs behind the collectives that the stream was made to wait for (:class:`Kernels`).
What reads memory without an operation (``tolist``, ``numpy``) is a host that reads without having
synchronised: it sees the poison that outputs hold until their collective has run.

:func:`register` makes it known to torch and to :mod:`elastic.process_group.semantics`;
:func:`use_by_default` makes it the backend of ``elastic.join()`` in this process.
"""

from __future__ import annotations

import datetime
import functools
import math
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
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.process_group import (
    DEFAULT_BACKENDS,
    Semantics,
    keep_for_ever,
    register_semantics,
)

NAME = "nccl_semantics"
POISON = -77  # of integers; a size that was read too early is negative, and fails at once
_LOOK_S = 0.0002
_NO_TIMEOUT = datetime.timedelta(0)
_CPU = torch.device("cpu")
_in_torch = dist.Work.wait


@dataclass
class Control:
    """The tests' control of the backend. One per process: :data:`control`."""

    # From the end of the exchange until the result is in the output.
    latency_s: float = 0.001
    hang_in_abort: bool = False
    hang_in_build: bool = False
    # ProcessGroupNCCL2 (torch 2.15) has no _group_start and _group_end.
    is_nccl2: bool = field(default_factory=lambda: os.environ.get("NCCL_SEMANTICS") == "2")
    calls: list[str] = field(default_factory=list)  # of what aborts


control = Control()

# Begins a collective on the gloo group; gives its work, and what puts its result into the outputs.
Exchange = Callable[[Any], tuple[dist.Work, Callable[[], None]]]


class Stream:
    """The device's current stream: what it was made to wait for."""

    def __init__(self) -> None:
        self._awaited: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()

    def wait_for(self, landed: threading.Event) -> None:
        """What is queued from now on runs behind that collective (``cudaStreamWaitEvent``)."""
        self._awaited.put(landed)

    def run_up(self) -> None:
        """Run everything that is queued: before the next kernel, or when the host synchronizes."""
        while not self._awaited.empty():
            self._awaited.get().wait()


stream = Stream()


def synchronize(device: torch.device = _CPU) -> None:
    """``torch.cuda.current_stream().synchronize()``: of what the stream waits for, no more."""
    stream.run_up()


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, operations of this thread run in the order of the stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream.run_up()
        return func(*args, **(kwargs or {}))


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
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.garbage = garbage
        self.landed = threading.Event()
        self._outputs = outputs
        self._is_barrier = is_barrier

    def is_completed(self) -> bool:
        """ProcessGroupNCCL.cpp, ``WorkNCCL::isCompleted``: whether the kernel has returned. Of an
        aborted communicator it has, and errors are not looked for."""
        return self.landed.is_set()

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
        return True

    def synchronize(self) -> None:
        stream.wait_for(self.landed)

    def get_future(self) -> Any:
        return _Future(self.landed, self._outputs)

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class StreamGroup(dist.ProcessGroup):
    """A communicator: one thread runs its collectives, one after the other, behind the host."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        # With a device_id the communicator is made in here (``eagerConnectSingleDevice``): the
        # call blocks until all peers have come, and there is no group yet that could be aborted.
        while control.hang_in_build:
            time.sleep(_LOOK_S)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._aborted = threading.Event()
        self._works: queue.SimpleQueue[StreamWork | None] = queue.SimpleQueue()
        self._backend = _Backend2(self) if control.is_nccl2 else _Backend(self)
        self._thread = threading.Thread(target=self._run, name="nccl-semantics", daemon=True)
        self._thread.start()

    # -- what torch and the product ask of any group --------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        """Of collectives: they wait until they are aborted."""

    def _start_coalescing(self, device: torch.device) -> None:
        control.calls.append("start coalescing")

    def _end_coalescing(self, device: torch.device) -> None:  # type: ignore[override]
        control.calls.append("end coalescing")

    def abort(self) -> None:
        """ProcessGroup.hpp, ``abort``: of all backends."""
        self._backend.abort()

    def shutdown(self) -> None:
        """ProcessGroupNCCL.cpp, ``shutdown``: what is queued runs to its end before."""
        self._works.put(None)
        self._thread.join()

    # -- collectives ----------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        staged = tensor.detach().clone()
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        own = staged.clone()
        return self._queue(
            [tensor],
            lambda gloo: (gloo.allreduce([staged], options), lambda: _land(tensor, staged)),
            # A ring has summed up some ranks' parts of some chunks.
            lambda: _land(tensor, own),
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        staged = tensor.detach().clone()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = opts.rootRank, 0
        is_root = opts.rootRank == self.rank()  # ncclBroadcast in place: nothing is written there
        return self._queue(
            [] if is_root else [tensor],
            lambda gloo: (
                gloo.broadcast([staged], options),
                lambda: None if is_root else _land(tensor, staged),
            ),
        )

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        (gathered,), (mine,) = outputs, inputs
        sent = mine.detach().clone()
        staged = [torch.empty_like(t) for t in gathered]

        def land() -> None:
            for output, result in zip(gathered, staged, strict=True):
                _land(output, result)

        return self._queue(gathered, lambda gloo: (gloo.allgather([staged], [sent]), land))

    def _allgather_base(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        parts = list(output.reshape(self.size(), *mine.shape).unbind(0))
        return self.allgather([parts], [mine], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """ProcessGroupNCCL.cpp, ``barrier``: an all-reduce of one element, and who waits for it
        waits on the host."""
        token = torch.zeros(1)
        return self._queue(
            [], lambda gloo: (gloo.allreduce([token]), lambda: None), is_barrier=True
        )

    def _queue(
        self,
        outputs: Sequence[torch.Tensor],
        exchange: Exchange,
        garbage: Callable[[], None] = lambda: None,
        *,
        is_barrier: bool = False,
    ) -> dist.Work:
        if self._aborted.is_set():  # NCCLUtils.cpp, ``NCCLComm::getNcclComm``
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
        for output in outputs:
            _poison(output)
        work = StreamWork(list(outputs), exchange, garbage, is_barrier=is_barrier)
        self._works.put(work)
        return work

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
                    keep_for_ever(self._gloo)  # gloo may never give it back
                    return False
                time.sleep(_LOOK_S)
            inner.wait()
        except RuntimeError:  # a peer has died: NCCL does not notice
            return False
        if self._aborted.wait(control.latency_s):
            return False
        land()
        return True

    def abort_communicator(self) -> None:
        """``ncclCommAbort``: kernels return, whatever has become of their results, and nothing is
        raised. It can hang (pytorch issue 119797)."""
        while control.hang_in_abort:
            time.sleep(_LOOK_S)
        self._aborted.set()
        self._works.put(None)


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


def _is_called_from_below(frame: FrameType) -> bool:
    """Whether C++ calls, for the reducer or for who has called torch's own ``wait``. C++ has no
    frames: the next one is that of who has called it."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(("elastic.process_group.", "torch.nn.", "torch.autograd."))


def _land(output: torch.Tensor, result: torch.Tensor) -> None:
    """As a kernel writes: autograd and version counters know nothing of it."""
    output.data.copy_(result)


def _poison(output: torch.Tensor) -> None:
    if output.is_floating_point() or output.is_complex():
        output.data.fill_(math.nan)
    elif output.dtype == torch.bool:
        output.data.fill_(True)
    else:
        output.data.fill_(POISON & 0xFF if output.dtype == torch.uint8 else POISON)


@functools.cache  # once per process
def register() -> str:
    """Make the backend known; its name."""
    dist.Backend.register_backend(NAME, StreamGroup, devices=["cpu"])
    # torch 2.15 attaches a flight recorder to groups whose backend has none, and cannot attach one
    # to a group in Python (distributed_c10d.py, _maybe_attach_flight_recorder).
    recorders: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add(NAME)
    register_semantics(NAME, Semantics(is_on_stream=True, synchronize=synchronize))
    return NAME


def use_by_default() -> None:
    """Scripts that do not choose a backend train on this one. What this thread does with tensors
    runs on the stream from now on."""
    DEFAULT_BACKENDS["cpu"] = register()
    Kernels().__enter__()  # type: ignore[no-untyped-call]
