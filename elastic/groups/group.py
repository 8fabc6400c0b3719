"""A process group that can be aborted: built for one world, never blocked by a dead peer."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import fcntl
import functools
import os
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from elastic import torch_private
from elastic.errors import (
    SYSTEM_CLOCK,
    ConfigError,
    ElasticError,
    GroupBuildFailed,
    Superseded,
    TrainingError,
)
from elastic.groups import pending
from elastic.groups.collectives import broadcast_json
from elastic.groups.deferred import DeferredGroup, destroy_process_group, init_process_group
from elastic.groups.faults import is_world_fault, record
from elastic.groups.pending import (
    PendingWorks,
    has_streams,
    have_ended,
    open_works,
    pending_works,
    report_collectives,
    semantics_of,
)
from elastic.groups.store import (
    OpenStore,
    agree_on_nonce,
    first_line,
    open_store,
    rendezvous,
    store_of_launcher,
)
from elastic.groups.world import World, fresh_nonce, world_from_environment
from elastic.link import link
from elastic.link.link import GroupSpec
from elastic.telemetry.events import WorkerStuck
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.tuning import environment, intervals
from elastic.tuning.environment import TUNED
from elastic.tuning.intervals import (
    BUILD_MIN_S,
    DRAIN_S,
)
from elastic.wire import base
from elastic.wire.base import PEER_SILENCE_S

# While a group is being built, its sockets appear one after the other: the new ones are shut down
# this often.
ABORT_AGAIN_S = 0.005
# An abandoned build may wait for a dead peer to connect. Its own process connects instead, and
# again after this, because it shuts sockets down meanwhile.
BUILD_CONNECT_AGAIN_S = 0.05
# For a process to connect to its own abandoned build, within one machine.
OWN_CONNECT_S = 1.0
# A group is built in milliseconds. If one is not connected after this, a peer does not respond: the
# connections begun since the last check get their limit (peer_silence_s).
BUILD_LOOK_S = 0.25
# After its limit a build ends and reports which rank is missing, unless it hangs.
BUILD_GRACE_S = 0.5
# This long after the limit of an abort, a timer without Python ends the process if the deadline in
# Python has not, because a thread holds the interpreter lock.
LAST_RESORT_S = 2.0
# A deadline that ends the process counts ticks of this length: a machine that was frozen counts
# one.
DEADLINE_TICK_S = 0.05

# ----------------------------------------------------------------------------
# Deadlines for calls that cannot be interrupted, and the end of a process that is stuck in one.
#
# A call into NCCL that hangs cannot be interrupted: no exception reaches it, and its thread never
# returns. The process ends, and its agent starts another one, as after any crash.

STUCK_EXIT_CODE = 1
_STDERR = 2


class CallDeadline:
    """Calls ``expire`` once, in its own thread, unless :meth:`cancel` is called in time.

    It counts ticks, not wall-clock time: a process that was stopped (SIGSTOP, a frozen container)
    could not complete its call, and still has the remaining time when it continues.
    """

    def __init__(self, timeout_s: float, expire: Callable[[], object], *, name: str) -> None:
        self._ticks = max(1, round(timeout_s / DEADLINE_TICK_S))
        self._expire = expire
        self._returned = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Report that the call has returned. Thread-safe."""
        self._returned.set()

    def end(self) -> None:
        """Like :meth:`cancel`, but wait until the thread has ended."""
        self._returned.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in range(self._ticks):
            if SYSTEM_CLOCK.wait(self._returned, DEADLINE_TICK_S):
                return
        self._expire()


class LastResort:
    """Ends the process from a C thread if :meth:`cancel` is not called in time.

    A thread that waits in C++ and holds the interpreter lock blocks all Python code, including
    every :class:`CallDeadline`. faulthandler's timer needs no Python: it writes the stacks of all
    threads to stderr, and ends the process with code 1. There is one timer per process: this one
    replaces any that the script has set with ``faulthandler.dump_traceback_later``.
    """

    def __init__(self, timeout_s: float) -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STDERR)

    def cancel(self) -> None:
        """Cancel the timer. Thread-safe."""
        faulthandler.cancel_dump_traceback_later()


def end_process(reason: str, journal: EventSink | None = None) -> NoReturn:
    """End this process now, with the reason on stderr, in the journal and in torch's error file."""
    try:
        os.write(
            _STDERR, f"elastic: {reason}; this worker ends, and its agent restarts it\n".encode()
        )
        if journal is not None:
            journal.emit(WorkerStuck(reason=reason))
        record(ElasticError(reason))
    finally:
        os._exit(STUCK_EXIT_CODE)


def leak(group: object) -> None:
    """Never run the group's destructor, not even at exit: it would join a stuck thread.

    This leaks two threads and a few descriptors, until the group's timeout ends them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# ----------------------------------------------------------------------------
# Opens a communicator outside torch's groups, and aborts communicators on a separate thread,
# with a deadline.
#
# ``ncclCommAbort`` waits for kernels and for NCCL's own threads, and can hang: if a peer aborts
# another communicator first (pytorch issue 119797), or in the driver. The link's thread has to
# send heartbeats, and the training thread has to handle signals, so neither of them calls it. This
# module contains all uses of torch's private names for it.


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
        self._last_resort.cancel()

    def _run(self) -> None:
        try:
            self._abort()
        except Exception:  # noqa: BLE001  logged, and the deadline acts
            # Collectives may still run: the main thread would wait for them forever, without a
            # report. The deadline stays active and ends the process.
            get_logger().exception("NCCL's communicators could not be aborted")
        else:
            self._deadline.cancel()
            self._last_resort.cancel()


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


# ----------------------------------------------------------------------------
# The device that a worker trains on.

# A launcher or container runtime that gives each worker one GPU sets one of these.
_MASKS = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)


def choose_device() -> torch.device:
    """This worker's device: ``cuda:LOCAL_RANK`` if CUDA is available, else the CPU.

    A worker that sees only one GPU because of a mask uses it, whatever its local rank.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", device_index(os.environ, torch.cuda.device_count()))


def device_index(environ: Mapping[str, str], visible: int) -> int:
    """The index of the GPU that a worker uses, out of ``visible`` GPUs.

    >>> device_index({"LOCAL_RANK": "3"}, 8)
    3
    >>> device_index({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, 1)
    0
    """
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    if local_rank < visible:
        return local_rank
    if visible == 1 and any(environ.get(mask) not in (None, "", "all") for mask in _MASKS):
        return 0
    raise ConfigError(
        f"local rank {local_rank} has no GPU: this node has {visible}",
        hint="lower --nproc-per-node, or hide the GPUs with CUDA_VISIBLE_DEVICES= to use CPUs",
    )


# ----------------------------------------------------------------------------
# Disables error handling in torch's NCCL backend: in-process recovery handles the errors.
#
# By default ProcessGroupNCCL's watchdog ends every surviving process when a peer is gone
# (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``WorkNCCL::handleException``). torch itself
# requires ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` if ``abort()`` is used (distributed_c10d.py,
# ``_abort_process_group``). If it is unset, torchrun's agent sets it to 1 in every worker
# (elastic/agent/server/local_elastic_agent.py), ours to 3 (:mod:`elastic.tuning.environment`);
# images and clusters set other values, under two names.

_MODE, _NO_HANDLING, _OF_TORCHRUN = environment.ERROR_HANDLING, "0", "1"
# Each of these turns error handling on as well. getCvarInt (c10d/Utils.hpp) reads the old names of
# a variable, too; ProcessGroupNCCL's constructor enables error handling for "desync debug".
_OVERRIDDEN = {
    "NCCL_ASYNC_ERROR_HANDLING": "it is an old name of " + _MODE,
    "TORCH_NCCL_DESYNC_DEBUG": "it turns on " + _MODE,
    "NCCL_DESYNC_DEBUG": "it turns on " + _MODE,
}
_OFF = ("", "0", "N", "n", "NO", "no", "False", "false")


def leave_errors_to_us(environ: MutableMapping[str, str], *, is_in_process: bool) -> None:
    """Call this before a group on NCCL is created. In restart mode the user's value is kept."""
    if not is_in_process:
        environ.setdefault(_MODE, _NO_HANDLING)
        return
    tuned = environ.get(TUNED, "").split(",")
    value = environ.get(_MODE, _NO_HANDLING)
    if _MODE in tuned or value == _OF_TORCHRUN:
        get_logger().info("%s is 0 for in-process recovery; it was %s", _MODE, value)
    elif value != _NO_HANDLING:
        _say(_MODE, value, "it ends all surviving workers when a peer dies")
    environ[_MODE] = _NO_HANDLING
    for setting in environment.in_process_settings():
        environ.setdefault(setting.name, setting.value)  # the agent has warned of unsafe values
    for name, why in _OVERRIDDEN.items():
        if (value := environ.pop(name, "0")) not in _OFF:
            _say(name, value, why)


def refuse_detail() -> None:
    """Raise ConfigError for ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which wraps each process group.

    The wrapper (torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp) replaces the backend whose
    waits this library interrupts: workers on gloo crashed with SIGSEGV in their first step
    (torch 2.13). DETAIL also enables NCCL's error handling, which ends all survivors when a peer
    dies. It cannot be undone: torch's C++ code reads it on import.
    """
    if dist.get_debug_level().name == "DETAIL":  # type: ignore[attr-defined]
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then wraps process groups, and workers crash in "
            "their first collective, or when a peer dies",
            hint="use TORCH_DISTRIBUTED_DEBUG=INFO, or remove it; `elastic doctor` checks each "
            "collective, and the report of a hang names ranks whose collectives differ",
        )


def _say(name: str, value: str, why: str) -> None:
    get_logger().warning(
        "%s=%s is overridden for in-process recovery: %s. Remove it from the environment of this "
        "job",
        name,
        value,
        why,
    )


# ----------------------------------------------------------------------------
# Finds the sockets of a store and a process group among the user's, and shuts them down.
#
# On gloo nothing else releases a rank that waits for a departed rank: the backend's ``abort()``
# returns at once and the collective keeps waiting [measured, torch 2.13]. Shutting down the
# sockets releases it, and also a rank that is still building its group.
#
# A socket is identified by the event loop that watches it. Every gloo device, and the store on
# rank 0, run a loop with an epoll descriptor that is opened while the group is built, and the
# kernel lists what each of them watches (``/proc/self/fdinfo``), including later connections. The
# store's client socket is not watched; it is identified by the store's port. Neither rule matches
# a socket that a thread of the user opens meanwhile.

_FDS = "/proc/self/fd"
_EPOLL = "anon_inode:[eventpoll]"
_TCP = (socket.AF_INET, socket.AF_INET6)
_PAIR_BYTES = 8  # of a pair's number, in native byte order
_PAUSE_PER_CONNECT = 4.0  # pause between rounds of connections, in multiples of a round


class Footprint:
    """The descriptors that a store and a group add to this process.

    Create it before them; :meth:`seal` it when they are complete. Before that, it also includes
    sockets that are being opened, so that a half-built group can be shut down.
    """

    def __init__(self, store_port: int | None) -> None:
        self._store_port = store_port
        self._before = _descriptors()
        self._pollers: frozenset[int] | None = None  # None: they are still being created
        self._store: dict[int, int] = {}

    def seal(self) -> None:
        """Mark the group complete: sockets that the user opens later are never attributed to it."""
        self._store = self._new_store_sockets()
        self._pollers = frozenset(self._new_pollers())

    def sockets(self) -> dict[int, int]:
        """The inode of each socket, listening ones included, by descriptor."""
        has_pollers = self._pollers is not None
        inodes = dict(self._store) if has_pollers else self._new_store_sockets()
        for poller in self._pollers if self._pollers is not None else self._new_pollers():
            inodes |= _watched_sockets(poller)
        return inodes

    def close_on_exec(self) -> None:
        """Keep the sockets out of programs that this process starts: gloo does not."""
        for fd, inode in self.sockets().items():
            with _held(fd, inode) as held:
                if held is not None:
                    fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)

    def give_up_on_silence(self, silence_s: float) -> None:
        """Make a collective fail if its peer's machine acknowledges nothing for ``silence_s``.

        gloo sets neither keep-alive nor a timeout (gloo/transport/tcp/device.cc): when the packets
        of one established connection were dropped, two ranks waited for each other until the
        group's timeout, half an hour. Now both fail 6.4 s after the first lost packet [measured,
        torch 2.13, silence_s=6], and each error names the peer:
        :func:`elastic.groups.faults.unreachable_peers`.
        """
        for fd, inode in self.sockets().items():
            with _held(fd, inode) as held:
                if held is not None:
                    base.give_up_on_silence(held, silence_s)

    def shut_down(self) -> None:
        """Shut down every connection. This releases all waits on them, at both ends."""
        for fd, inode in self.sockets().items():
            shut_down(fd, inode)

    def connect_to_itself(self, ranks: int) -> None:
        """Release a build that waits for one of ``ranks`` ranks to connect to this one.

        Of two ranks in gloo, one connects and the other waits for it. If the first is gone, the
        second has no socket that could be shut down: it waited for the group's timeout [measured,
        torch 2.13]. Its listener assigns a connection to a pair by the first number that is sent
        (gloo/transport/tcp/listener.cc): the index of the pair, of which there is one per rank.
        This method opens a connection for each pair, and closes it at once.
        """
        for fd, inode in self.sockets().items():
            with _held(fd, inode) as held:
                address = _listening_at(held) if held is not None else None
            if address is not None and address[1] != self._store_port:
                for pair in range(ranks + 1):
                    _send_once(address, pair.to_bytes(_PAIR_BYTES, sys.byteorder))

    def _new_pollers(self) -> set[int]:
        """Epoll descriptors that watch a listening socket opened since then.

        Both of torch's loops have one. A user's asyncio or HTTP client has none. The number of an
        epoll descriptor proves nothing: the last group may be freed only after this object was
        created, and the new group may reuse the number.
        """
        before = set(self._before.values())
        return {
            fd
            for fd, target in _descriptors().items()
            if target == _EPOLL
            and any(
                _socket_target(inode) not in before and _is_listening(s, inode)
                for s, inode in _watched_sockets(fd).items()
            )
        }

    def _new_store_sockets(self) -> dict[int, int]:
        if self._store_port is None:
            return {}
        return {
            fd: inode
            for fd, target in _descriptors().items()
            if self._before.get(fd) != target
            and (inode := _inode_of(target)) is not None
            and self._store_port in _ports(fd, inode)
        }


class BuildWatch:
    """Ends the build of a group that is aborted, or takes too long.

    It shuts sockets down repeatedly, since a build keeps opening new ones. It has its own thread,
    so that the aborting thread is not blocked. NCCL's initialisation uses none of these sockets
    and cannot be aborted: if the build has not ended some time after it was aborted, ``is_stuck``
    is called, which is expected to end the process.
    """

    def __init__(
        self,
        footprint: Footprint,
        timeout_s: float,
        is_stuck: Callable[[], object],
        *,
        ranks: int = 1,
        silence_s: float = base.PEER_SILENCE_S,
    ) -> None:
        self._footprint = footprint
        self._ranks = ranks
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._is_stuck = is_stuck
        self._given_up = threading.Event()
        self._built = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-build-watch", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Abort the build. Thread-safe."""
        self._given_up.set()

    def end(self) -> None:
        """The build has ended, successfully or not."""
        self._built.set()
        self._given_up.set()
        self._thread.join()

    def _run(self) -> None:
        ends_s = SYSTEM_CLOCK.monotonic() + self._timeout_s + BUILD_GRACE_S
        while (left_s := ends_s - SYSTEM_CLOCK.monotonic()) > 0:
            if SYSTEM_CLOCK.wait(self._given_up, min(left_s, BUILD_LOOK_S)):
                break
            # Still building, perhaps with a peer that does not answer.
            self._footprint.give_up_on_silence(self._silence_s)
        if self._built.is_set():
            return
        deadline = CallDeadline(
            intervals.GIVEN_UP_BUILD_S, self._is_stuck, name="elastic-build-deadline"
        )
        connects_s = SYSTEM_CLOCK.monotonic()
        while not SYSTEM_CLOCK.wait(self._built, ABORT_AGAIN_S):
            self._footprint.shut_down()
            if (began_s := SYSTEM_CLOCK.monotonic()) >= connects_s:
                self._footprint.connect_to_itself(self._ranks)
                took_s = SYSTEM_CLOCK.monotonic() - began_s
                connects_s = began_s + max(BUILD_CONNECT_AGAIN_S, _PAUSE_PER_CONNECT * took_s)
        deadline.end()


def log_still_open(sockets: Mapping[int, int]) -> None:
    """Log how many of these outlive their group. A subgroup, a traceback or the future of a
    collective may still refer to it. The garbage collector would free most of them, but it
    takes a tenth of a second."""
    if left := still_open(sockets):
        get_logger().debug("%d sockets of the last process group are still open", len(left))


def still_open(sockets: Mapping[int, int]) -> list[int]:
    """The descriptors that still refer to the same sockets."""
    return [fd for fd, inode in sockets.items() if _inode_of(_target_of(fd)) == inode]


def _listening_at(held: socket.socket) -> tuple[str, int] | None:
    """The address of a listening TCP socket."""
    if held.family not in _TCP or not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return None
    host, port = held.getsockname()[:2]
    return str(host), int(port)


def _send_once(address: tuple[str, int], data: bytes) -> None:
    with (
        contextlib.suppress(OSError),  # the build has ended meanwhile
        socket.create_connection(address, timeout=OWN_CONNECT_S) as connection,
    ):
        connection.sendall(data)


def shut_down(fd: int, inode: int) -> bool:
    """End the connection behind ``fd`` if it is still the socket ``inode`` and does not listen.

    The check uses a copy, since the number may refer to another socket at any moment. Listening
    sockets are not touched: libuv terminates the process when accept() fails on one [measured].

    Only the reading side is shut down: gloo sees the end of the stream and closes the connection
    both ways. If the writing side were shut down, too, a write in between would fail; gloo treats
    that as a full buffer and drops the data (``Pair::write`` on EPIPE; see
    :mod:`elastic.groups.pending`): 16 of 300 collectives that were aborted at random moments
    never returned, against 5 this way [measured, torch 2.13].
    """
    with _held(fd, inode) as held:
        if held is None or held.family not in _TCP:
            return False
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            held.shutdown(socket.SHUT_RD)
        except OSError:
            return False  # it was not connected, or no longer is
    return True


@contextmanager
def _held(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """A copy of the socket, or None if ``fd`` now refers to something else."""
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    status = os.fstat(copy)
    if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as held:
        yield held


def _is_listening(fd: int, inode: int) -> bool:
    with _held(fd, inode) as held:
        return held is not None and bool(held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ports(fd: int, inode: int) -> set[int]:
    """The ports of both ends of a TCP socket."""
    ports: set[int] = set()
    with _held(fd, inode) as held:
        if held is None or held.family not in _TCP:
            return ports
        for name in (held.getsockname, held.getpeername):
            try:
                ports.add(int(name()[1]))
            except OSError:
                continue  # no peer (yet)
    return ports


def _watched_sockets(poller: int) -> dict[int, int]:
    """The sockets that an epoll descriptor watches."""
    try:
        with open(f"/proc/self/fdinfo/{poller}", encoding="ascii") as lines:
            watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    except OSError:
        return {}
    inodes: dict[int, int] = {}
    for fd in watched:
        inode = _inode_of(_target_of(fd))
        if inode is not None:
            inodes[fd] = inode
    return inodes


def _descriptors() -> Mapping[int, str]:
    return {int(name): _target_of(int(name)) for name in os.listdir(_FDS)}


def _target_of(fd: int) -> str:
    try:
        return os.readlink(f"{_FDS}/{fd}")
    except OSError:
        return ""  # closed since it was listed


def _socket_target(inode: int) -> str:
    return f"socket:[{inode}]"


def _inode_of(target: str) -> int | None:
    """
    >>> _inode_of("socket:[4711]")
    4711
    """
    return int(target[8:-1]) if target.startswith("socket:[") else None


# ----------------------------------------------------------------------------
# The process group of one world: built when the world begins, destroyed when it ends.
#
# A group has one of three origins: a world that an agent has announced
# (:meth:`ProcessGroup.build`), the environment that any launcher sets (:meth:`ProcessGroup.form`),
# or the script, which then owns the group.

DEFAULT_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class ProcessGroup:
    """Owns torch's default group for one world at a time, and its pending collectives.

    Its life cycle: :meth:`build` (or :meth:`form`), :meth:`synchronize` at each boundary between
    steps, :meth:`abort` from any thread when the world is over, :meth:`destroy`; then it can be
    built again. Its changes to torch are in :mod:`elastic.groups.pending`.
    """

    def __init__(
        self, device: torch.device, backend: str | None, journal: EventSink | None = None
    ) -> None:
        refuse_detail()
        self.device = device
        self._backend = backend or DEFAULT_BACKENDS.get(device.type, "gloo")
        self._is_on_stream = has_streams(device.type, self._backend)
        if self._is_on_stream:
            torch_private.check_streams()
        self._journal = journal
        self._owned = False
        self._where = ""  # describes the group, for messages
        self._mesh = ""  # dimensions of this rank's replica: the same on all ranks
        self._silence_s = PEER_SILENCE_S
        self._store: OpenStore | None = None
        self._covered: tuple[int, ...] = ()
        self._excepthook: pending.TorchExceptHook | None = None
        self._deferred: DeferredGroup | None = None
        self._works = pending_works()
        # Shared with the thread that aborts:
        self._lock = threading.Lock()
        self._footprint: Footprint | None = None  # of the group that is built, or is being built
        self._watch: BuildWatch | None = None  # while building
        self._is_aborted = False
        self._communicators: CommunicatorAbort | None = None  # being aborted, or aborted
        self._is_counted = False  # there is a group whose collectives are queued

    @property
    def is_foreign(self) -> bool:
        """Whether the script has created a group itself."""
        is_deferred = self._deferred is not None and self._deferred.is_pending
        return bool(dist.is_initialized()) and not self._owned and not is_deferred

    def defer(self, has_entered: Callable[[], bool]) -> None:
        """Until the first world, let the script call ``init_process_group`` without an effect, and
        read the rank and the size that it has in the largest world. Call it once.

        ``has_entered``: see :class:`~elastic.groups.deferred.DeferredGroup`.
        """
        self._deferred = DeferredGroup(self.device, self._backend, lambda: self._owned, has_entered)
        self._deferred.install()

    @property
    def is_aborted(self) -> bool:
        """Whether the current group, or the last one, was aborted."""
        return self._is_aborted

    def synchronize(self) -> None:
        """Return when every collective that the script has queued on a device has succeeded.

        Called before a step counts: results that were read since the last call are then valid.

        Raises:
            GroupAborted: the group was aborted, and the collectives' outputs may be invalid.
        """
        self._works.synchronize()

    @property
    def may_be_garbage(self) -> bool:
        """Whether results that the script reads may be invalid, as after an abort."""
        return self._works.may_be_garbage

    @property
    def store(self) -> Store:
        """The store of the current world, the same on all of its ranks."""
        return self._store.client if self._store is not None else torch_private.default_store()

    def sockets(self) -> tuple[int, ...]:
        """The descriptors of all sockets of the store and the group, including listening ones."""
        footprint = self._footprint
        return tuple(sorted(footprint.sockets())) if footprint is not None else ()

    # -- a world that the agent announced -----------------------------------------------------

    def keep_connections(self) -> None:
        """Keep the connections open until the process has ended, even if the group is destroyed
        before: peers then notice the end when the agent does."""
        for fd in self.sockets():
            with contextlib.suppress(OSError):
                os.dup(fd)

    def build(self, spec: GroupSpec, *, superseded: Callable[[], bool], timeout_s: float) -> None:
        """Build the group of a world on the main thread. :meth:`abort` from another one ends it.

        A failed call cleans up after itself, and can be repeated.

        Raises:
            Superseded: a newer world is known, or :meth:`abort` was called meanwhile.
            GroupBuildFailed: peers did not arrive, or have left; names them if the store can.
        """
        assert not self._owned, "destroy the group of the last world first"

        def give_up() -> None:
            if self._is_aborted or superseded():
                raise Superseded(f"generation {spec.generation} is over")

        self._begin(spec, timeout_s)
        try:
            give_up()
            self._assemble(spec, give_up, SYSTEM_CLOCK.monotonic() + timeout_s)
            self._end_building()
            give_up()
        except BaseException as error:
            self._end_building()
            self._clear_away(error)
            if not isinstance(error, OSError) and not is_world_fault(error):
                raise
            if not isinstance(error, Superseded):
                give_up()
            raise _build_failed(spec, error) from error

    def _begin(self, spec: GroupSpec, timeout_s: float) -> None:
        self._end_deferral()
        if self.is_foreign:
            raise TrainingError(
                f"generation {spec.generation} cannot be built: the script has created a process "
                f"group of {dist.get_world_size()} ranks ({dist.get_backend()}) since "
                "elastic.join(), by a function that this library does not know",
                hint="call torch.distributed.init_process_group(), which is deferred to the first "
                "world after elastic.join(), or remove what creates the group",
            )
        pending.release_waits()
        with self._lock:
            self._owned = True
            self._is_aborted = False
            self._works = self._open_works()
            self._where = f"generation {spec.generation} on rank {spec.rank} of {spec.size}"
            self._silence_s = intervals.peer_silence_of(os.environ)
            self._footprint = Footprint(spec.store_port if spec.size > 1 else None)
            self._watch = BuildWatch(
                self._footprint,
                timeout_s,
                self._building_is_stuck,
                ranks=spec.size,
                silence_s=self._silence_s,
            )

    def _open_works(self) -> PendingWorks:
        semantics = semantics_of(self.device.type, self._backend)
        return open_works(semantics, self.device, on_error=self.abort)

    def report_collectives(self) -> None:
        """Record on the worker's page how many collectives have begun. On the link's thread: the
        training thread may be blocked behind a collective that the script does not wait for."""
        with self._lock:  # not while the group is being destroyed
            if self._is_counted and not self._is_aborted:
                report_collectives()

    def _assemble(self, spec: GroupSpec, give_up: Callable[[], None], deadline_s: float) -> None:
        self._store = open_store(
            spec, give_up, deadline_s=deadline_s, use_tcp_store="nccl" in self._backend
        )
        store = self._store.client
        if spec.size > 1:
            rendezvous(store, spec, give_up, deadline_s=deadline_s, mesh=self._mesh)
        left_s = max(BUILD_MIN_S, deadline_s - SYSTEM_CLOCK.monotonic())
        self._initialize(PrefixStore(spec.nonce, store), spec.rank, spec.size, left_s)
        # From here on the timeout limits the duration of a step, not the wait for absent peers.
        timeout = datetime.timedelta(seconds=intervals.collective_of_environment(os.environ))
        torch_private.set_group_timeout(timeout)
        store.set_timeout(timeout)

    def _end_building(self) -> None:
        with self._lock:
            watch, self._watch = self._watch, None
            footprint = self._footprint
            self._is_counted = self._is_on_stream and dist.is_initialized()
        if watch is None or footprint is None:
            return
        watch.end()
        footprint.seal()
        footprint.close_on_exec()
        footprint.give_up_on_silence(self._silence_s)
        self._covered = self.sockets()
        link.cover(self._covered)

    def _clear_away(self, error: BaseException) -> None:
        # The frames hold the half-built group, and the store's port.
        traceback.clear_frames(error.__traceback__)
        if self._is_on_stream:
            self.abort()  # destroying a communicator waits for peers, and they may be gone
        self.destroy(is_for_next=True)

    def _initialize(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        if self._is_on_stream:
            leave_errors_to_us(os.environ, is_in_process=self._footprint is not None)
        hook = pending.TorchExceptHook()
        init_process_group(
            self._backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=self.device if self.device.type == "cuda" else None,
        )
        hook.installed()
        self._excepthook = hook

    def abort(self) -> None:
        """Release all waits for this group's peers. Thread-safe, idempotent; returns promptly.

        On gloo the backend's own abort does nothing [measured], so the sockets are shut down, and
        waits for collectives end. NCCL's communicators are aborted on a separate thread: kernels
        that are queued behind them then run, on half-reduced gradients. The abort is recorded
        first, so code that sees such a collective end also sees the abort.
        """
        with self._lock:
            self._is_aborted = True
            footprint, watch = self._footprint, self._watch
            if footprint is None:
                return
            self._abort_works()
            footprint.shut_down()
            if watch is not None:
                watch.give_up()
            # A group that is still being initialised has nothing to abort yet.
            abort = self._communicator_abort() if self._is_on_stream else None
            if abort is not None and self._communicators is None:
                limit_s = intervals.ABORT_S
                self._communicators = CommunicatorAbort(
                    abort, limit_s, functools.partial(self._is_stuck, "aborting", limit_s)
                )

    def _abort_works(self) -> None:
        self._works.abort()

    def _communicator_abort(self) -> Callable[[], object] | None:
        """The call that aborts this group's communicators; None while there are none."""
        is_built = dist.is_initialized()
        return functools.partial(abort_communicators, self.device) if is_built else None

    def _is_stuck(self, what: str, limit_s: float) -> None:
        end_process(
            f"{what} the communicators of {self._where} has not returned for {limit_s:g} s",
            self._journal,
        )

    def _building_is_stuck(self) -> None:
        end_process(
            f"building the process group ({self._backend}) of {self._where} was aborted, because "
            f"the world is over or the timeout has expired, and has not returned for "
            f"{intervals.GIVEN_UP_BUILD_S:g} s",
            self._journal,
        )

    # -- the environment ----------------------------------------------------------------------

    def form(self) -> World:
        """Build the group that the environment describes, and agree on values that it lacks."""
        self._end_deferral()
        world = world_from_environment()
        self._works = self._open_works()
        if dist.is_initialized():  # the script had created a group itself
            warn_of_a_shared_store(os.environ)
            world = dataclasses.replace(world, rank=dist.get_rank(), size=dist.get_world_size())
            nonce = broadcast_json(fresh_nonce() if world.rank == 0 else None)
            return dataclasses.replace(world, nonce=world.nonce or str(nonce))
        timeout_s = intervals.collective_of_environment(os.environ)
        store = store_of_launcher(world, timeout_s)
        if not world.nonce:
            nonce = agree_on_nonce(store, world.rank, world.size, timeout_s=timeout_s)
            world = dataclasses.replace(world, nonce=nonce)
        # A process that fails, or is stopped, shuts the connections down: its end takes seconds in
        # which peers would wait in a collective.
        footprint = Footprint(None) if world.size > 1 and not self._is_on_stream else None
        self._initialize(PrefixStore(world.nonce, store), world.rank, world.size, timeout_s)
        if footprint is not None:
            footprint.seal()
            self._footprint = footprint
        self._owned = True
        return world

    # -- the end ------------------------------------------------------------------------------

    def destroy(self, *, is_for_next: bool = False) -> None:
        """Destroy the group, unless the script has created it. Main thread only.

        Never hangs on gloo: a group whose collectives do not return is leaked (see
        :mod:`elastic.groups.pending`). On NCCL, :meth:`abort` it first if a peer may be
        gone: otherwise, before another group (``is_for_next``), a deadline ends the process. At
        the end of a job peers have no deadline, and the changes to torch are undone.
        """
        self._take_down(is_for_next=is_for_next)
        if not is_for_next:
            pending.restore_waits()
            if self._deferred is not None:
                self._deferred.remove()

    def _end_deferral(self) -> None:
        if self._deferred is not None:
            self._deferred.end()

    def _take_down(self, *, is_for_next: bool) -> None:
        with self._lock:
            footprint, self._footprint = self._footprint, None
            self._is_counted = False
            communicators, self._communicators = self._communicators, None
        if communicators is not None:
            communicators.join()
        if not self._owned:
            return
        sockets = footprint.sockets() if footprint is not None else {}
        if footprint is not None:
            footprint.shut_down()
        is_left_behind = not self._dissolve(is_for_next)
        self._owned = False
        if self._store is not None:
            self._store.close()
        self._store = None
        if self._excepthook is not None:
            self._excepthook.remove()
        self._excepthook = None
        link.uncover(self._covered)
        if not is_left_behind:
            log_still_open(sockets)

    def _dissolve(self, is_for_next: bool) -> bool:
        """Destroy the group, if there is one; False if it had to be leaked."""
        have_ended(torch_private.groups(), f"in {self._where}")
        is_gone = not dist.is_initialized() or self._destroy_group(is_for_next)
        pending.reset_group_count()
        return is_gone

    def _destroy_group(self, is_for_next: bool) -> bool:
        """Destroy the group; False if it had to be leaked."""
        is_drained = self._works.drain(DRAIN_S)
        if not is_drained:
            leak(torch_private.default_group())
        if self._is_on_stream and self._is_aborted:
            with self._limited("aborting", intervals.ABORT_S):
                # Not destroy: that waits for queued operations.
                torch_private.abort_groups()
        elif self._is_on_stream and is_for_next:
            with self._limited("destroying", intervals.DESTROY_S):
                destroy_process_group()
        else:
            destroy_process_group()
        return is_drained

    @contextmanager
    def _limited(self, what: str, limit_s: float) -> Iterator[None]:
        """The body must return in time, or the process ends."""
        expire = functools.partial(self._is_stuck, what, limit_s)
        deadline = CallDeadline(limit_s, expire, name="elastic-destroy-deadline")
        try:
            yield
        finally:
            deadline.end()


def _build_failed(spec: GroupSpec, error: BaseException) -> Exception:
    if isinstance(error, Superseded | GroupBuildFailed):
        return error
    return GroupBuildFailed(
        f"the group of generation {spec.generation} could not be built on rank {spec.rank} "
        f"of {spec.size}: {type(error).__name__}: {first_line(error)}"
    )


def warn_of_a_shared_store(env: Mapping[str, str]) -> None:
    """Warn that a restarted worker may read the address of a dead one: torchrun's c10d and static
    rendezvous use one store for all restarts, without prefixes (pytorch/pytorch#135712; gloo hung
    in 4 of 9 restarts on a busy machine [measured, torch 2.13])."""
    is_shared = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_shared and env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        get_logger().warning(
            "torch.distributed.init_process_group() may hang after a restart: with this "
            "rendezvous backend torchrun uses one store for all restarts "
            "(https://github.com/pytorch/pytorch/issues/135712). Remove the call (elastic.join() "
            "creates the process group), or use --rdzv-backend=etcd, or, for "
            "--rdzv-backend=c10d, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
