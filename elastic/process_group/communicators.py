"""Opens a communicator outside torch's groups, and aborts communicators on a separate thread,
with a deadline.

``ncclCommAbort`` waits for kernels and for NCCL's own threads, and can hang: if a peer aborts
another communicator first (pytorch issue 119797), or in the driver. The link's thread has to send
heartbeats, and the training thread has to handle signals, so neither of them calls it. This module
contains all uses of torch's private names for it.
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
    """One per group. Any thread starts it, once; the main thread joins it.

    ``abort``: aborts the communicators; may hang. ``expire``: called at the deadline.
    """

    def __init__(
        self, abort: Callable[[], object], timeout_s: float, expire: Callable[[], object]
    ) -> None:
        self._abort = abort
        self._deadline = CallDeadline(timeout_s, expire, name="elastic-abort-deadline")
        # While ncclCommAbort hangs, Work.is_completed blocks and holds the interpreter lock.
        self._last_resort = LastResort(timeout_s + LAST_RESORT_S)
        self._thread = threading.Thread(target=self._run, name="elastic-abort", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until all communicators are aborted, or the deadline ends the process."""
        self._thread.join()
        self._deadline.end()
        self._last_resort.met()

    def _run(self) -> None:
        try:
            self._abort()
        except Exception:  # noqa: BLE001  logged, and the deadline acts
            # Collectives may still run: the main thread would wait for them forever, without a
            # report. The deadline stays active and ends the process.
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
    """Open a backend of ``size`` ranks that belongs to none of torch's groups.

    Like ``_new_process_group_helper`` (distributed_c10d.py), it connects to all peers if the
    backend supports eager connection, and blocks until they have arrived. ``nccl`` is built in up
    to torch 2.14; from 2.15 on it is a registered backend like any other.

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
    """Abort the communicators of all groups, including subgroups, together.

    Like torch's ``_abort_process_group`` (distributed_c10d.py), but without clearing its tables:
    the main thread may still use them.
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
    """Enclose aborts in ``ncclGroupStart`` and ``ncclGroupEnd``: they do not wait for each other.

    Up to torch 2.14 ``nccl`` is ProcessGroupNCCL, whose backend has these calls. From 2.15 on it is
    ProcessGroupNCCL2, which lacks them; torch's ``_abort_process_group`` then uses a coalescing
    region. ``_coalescing_manager`` is not used here: it keeps its list of operations in a table
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
