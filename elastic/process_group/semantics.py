"""The meaning of a collective's work, by backend: done on the host, or queued on a device's stream.

On gloo a work ends when its result is available, and raises the collective's error. On NCCL it is
queued on a stream of the device, and the host runs ahead of it:

- ``Work.wait()`` makes the current stream wait, not the host;
- without ``async_op`` there is no work at all: the kernel is queued on the current stream
  (``ProcessGroupNCCL::collective`` ends in ``return asyncOp ? work : nullptr``);
- the work's future is complete from the start (``ProcessGroupNCCL::initWork``), so its callback
  implies nothing about results;
- an abort makes the kernels return: the work is complete, nothing is raised, and its output holds
  whatever was reduced by then.

(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: ``WorkNCCL::wait``, ``WorkNCCL::isCompleted``;
docs/decisions/0022.) Code that needs a result checks :func:`semantics_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = [
    "HOST",
    "Semantics",
    "StreamEvent",
    "backend_of",
    "has_streams",
    "is_of_nccl",
    "register_semantics",
    "semantics_of",
]


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
