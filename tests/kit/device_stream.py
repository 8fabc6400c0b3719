"""The stream of a simulated device: queued operations run in order, and the host runs ahead.

The host simulates the device. An operation on a tensor corresponds to a kernel on the current
stream: it runs after the collectives that the stream waits for (:class:`Kernels`). Code that reads
memory without an operation (``tolist``, ``numpy``) corresponds to a host that reads without
synchronizing: it sees the poison that fills outputs until their collective has run.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = -77  # for integers; a size that is read too early is negative, and fails immediately
CPU = torch.device("cpu")
# Tensors whose operations may consist of a collective, or the wait for one, and kernels behind it.
_COMPOSED = ("DTensor", "AsyncCollectiveTensor")


class Stream:
    """The device's current stream, as the collectives that it waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: deque[threading.Event] = deque()

    def wait_for(self, landed: threading.Event) -> None:
        """Run later operations after this collective (``cudaStreamWaitEvent``)."""
        with self._lock:
            self._awaited.append(landed)

    def record(self) -> SimulatedEvent:
        """``cudaEventRecord``: an event that is complete once everything queued so far has run."""
        with self._lock:
            return SimulatedEvent(tuple(self._awaited))

    def run_up(self) -> None:
        """Run all queued operations: before the next kernel, or when the host synchronizes."""
        while True:
            with self._lock:
                if not self._awaited:
                    return
                first = self._awaited[0]
            first.wait()
            with self._lock:
                if self._awaited and self._awaited[0] is first:
                    self._awaited.popleft()


class SimulatedEvent:
    """An event on the stream."""

    def __init__(self, awaited: tuple[threading.Event, ...]) -> None:
        self._awaited = awaited

    def query(self) -> bool:
        """``cudaEventQuery``."""
        return all(landed.is_set() for landed in self._awaited)


stream = Stream()


def record(device: torch.device = CPU) -> SimulatedEvent:
    """As :func:`torch.cuda.Event.record` on the current stream."""
    return stream.record()


def synchronize(device: torch.device = CPU) -> None:
    """``torch.cuda.current_stream().synchronize()``: wait for the current stream only."""
    stream.run_up()


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which operations of this thread run in the order of the stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream.run_up()
        if any(kind.__name__ in _COMPOSED for kind in types):
            return NotImplemented  # torch asks the tensor itself, and what it does comes here
        return func(*args, **(kwargs or {}))


def land(output: torch.Tensor, result: torch.Tensor) -> None:
    """Write a result as a kernel does, without autograd and version counters."""
    output.data.copy_(result)


def land_all(outputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    for output, result in zip(outputs, results, strict=True):
        land(output, result)


def poison(output: torch.Tensor) -> None:
    if output.is_floating_point() or output.is_complex():
        output.data.fill_(math.nan)
    elif output.dtype == torch.bool:
        output.data.fill_(True)
    else:
        output.data.fill_(POISON & 0xFF if output.dtype == torch.uint8 else POISON)
