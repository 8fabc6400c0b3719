"""Opens a communicator outside of torch's groups, and aborts communicators: on a separate thread,
with a deadline.

``ncclCommAbort`` waits for kernels and for NCCL's own threads, and can hang: for a peer that
aborts another communicator first (pytorch issue 119797), or in the driver. The thread that hears
of a new world has heartbeats to send, and the thread that trains has signals to handle, so neither
of them calls it. What uses torch's private names for it is all in here.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d

from elastic.process_group.deadline import CallDeadline, LastResort
from elastic.telemetry.log import get_logger
from elastic.tuning.worker_intervals import LAST_RESORT_S


class CommunicatorAbort:
    """One per group. Begun once, from any thread; the main thread joins it.

    ``abort``: aborts the communicators, and may hang.
    """

    def __init__(
        self, abort: Callable[[], object], timeout_s: float, expire: Callable[[], object]
    ) -> None:
        self._abort = abort
        self._deadline = CallDeadline(timeout_s, expire, name="elastic-abort-deadline")
        # While ncclCommAbort hangs, Work.is_completed blocks with the interpreter lock.
        self._last_resort = LastResort(timeout_s + LAST_RESORT_S)
        self._thread = threading.Thread(target=self._run, name="elastic-abort", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Until all communicators are aborted; the deadline ends the process otherwise."""
        self._thread.join()
        self._deadline.end()
        self._last_resort.met()

    def _run(self) -> None:
        try:
            self._abort()
        except Exception:  # noqa: BLE001  logged, and the deadline acts
            # The collectives may still run: the main thread would wait for them forever, and
            # nothing reports it. The deadline continues and ends the process.
            get_logger().exception("NCCL's communicators could not be aborted")
        else:
            self._deadline.met()
            self._last_resort.met()


def open_communicator(
    backend: str,
    store: Any,
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout: datetime.timedelta,
) -> Any:
    """A backend of ``size`` ranks that is not part of any of torch's groups.

    As ``_new_process_group_helper`` creates it (distributed_c10d.py), including the connection to
    all peers where the backend can connect at once: this blocks until they have come. ``nccl`` is
    built in up to torch 2.14, and a registered backend like any other from 2.15 on.

    Args:
        backend: its name, without a device.
    """
    c10d: Any = distributed_c10d
    plugin = c10d.Backend._plugins.get(backend.upper())
    opened: Any
    if plugin is None:
        options = c10d.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
        options._timeout = timeout
        opened = c10d.ProcessGroupNCCL(store, rank, size, options)
        opened._set_sequence_number_for_group()
    elif plugin.extended_api:
        described = c10d._DistributedBackendOptions()
        described.store, described.timeout = store, timeout
        described.group_rank, described.group_size = rank, size
        described.group_id = "elastic-replicas"
        opened = plugin.creator_fn(described, None)
    else:
        opened = plugin.creator_fn(store, rank, size, timeout)
    if getattr(opened, "supports_splitting", False):
        opened.eager_connect_single_device(device)
    return opened


def abort_communicators(device: torch.device) -> None:
    """Abort every group's communicator, subgroups included, as one.

    As torch's own ``_abort_process_group`` does it (distributed_c10d.py), but for the clearing of
    its tables: the main thread is still inside.
    """
    names = dict(distributed_c10d._world.pg_names)
    newest_first = sorted(names, key=lambda group: names[group], reverse=True)
    backends: list[tuple[Any, Any]] = [
        (group, group._get_backend(device))
        for group in newest_first
        if device.type in {known.type for known in group._device_types}
    ]
    if not backends:
        return
    default, backend = backends[-1]
    with _as_one(default, backend, device):
        for _, other in backends:
            other.abort()


@contextmanager
def _as_one(group: Any, backend: Any, device: torch.device) -> Iterator[None]:
    """Within ``ncclGroupStart`` and ``ncclGroupEnd``, so that aborts do not wait for each other.

    Up to torch 2.14 ``nccl`` is ProcessGroupNCCL, whose backend has these calls. From 2.15 on it is
    ProcessGroupNCCL2, which has not; there torch's ``_abort_process_group`` begins a coalescing
    region. Not by ``_coalescing_manager`` here: that one keeps its list of operations in a table
    that the main thread may be using.
    """
    if hasattr(backend, "_group_start"):
        backend._group_start()
        try:
            yield
        finally:
            backend._group_end()
    elif getattr(backend, "supports_coalescing", False):
        group._start_coalescing(device)
        try:
            yield
        finally:
            group._end_coalescing(device)
    else:
        yield
