"""The process group of one world: built when the world begins, destroyed when it ends.

A group has one of three origins: a world that an agent has announced (:meth:`ProcessGroup.build`),
the environment that any launcher sets (:meth:`ProcessGroup.form`), or the script, which then owns
the group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
)

from elastic import torch_private
from elastic.clock import SYSTEM_CLOCK
from elastic.link import forks
from elastic.process_group import patches
from elastic.process_group.collectives import broadcast_json
from elastic.process_group.communicators import CommunicatorAbort, abort_communicators
from elastic.process_group.deadline import CallDeadline, end_process, leak
from elastic.process_group.nccl_environment import leave_errors_to_us, refuse_detail
from elastic.process_group.pending import PendingWorks, open_works, pending_works
from elastic.process_group.semantics import has_streams, semantics_of
from elastic.process_group.sockets import BuildWatch, Footprint, log_still_open
from elastic.process_group.stale_groups import have_ended
from elastic.process_group.wait_phase import report_collectives
from elastic.secure_channel.limits import PEER_SILENCE_S
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.tuning import timeouts
from elastic.tuning.worker_intervals import BUILD_MIN_S, DRAIN_S
from elastic.world.arrival import GroupSpec, OpenStore, first_line, meet, open_store
from elastic.world.discovery import agree_on_nonce, store_of_launcher
from elastic.world.faults import GroupBuildFailed, Superseded, is_world_fault
from elastic.world.world import World, fresh_nonce, world_from_environment

__all__ = ["GroupSpec", "ProcessGroup"]

DEFAULT_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class ProcessGroup:
    """Owns torch's default group for one world at a time, and its pending collectives.

    Its life cycle: :meth:`build` (or :meth:`form`), :meth:`settle` at each boundary between steps,
    :meth:`abort` from any thread when the world is over, :meth:`destroy`; then it can be built
    again. Its changes to torch are in :mod:`elastic.process_group.patches`.
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
        self._excepthook: patches.TorchExceptHook | None = None
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
        return bool(dist.is_initialized()) and not self._owned

    @property
    def is_aborted(self) -> bool:
        """Whether the current group, or the last one, was aborted."""
        return self._is_aborted

    def settle(self) -> None:
        """Return when every collective that the script has queued on a device has succeeded.

        Called before a step counts: results that were read since the last call are then valid.

        Raises:
            GroupAborted: the group was aborted, and the collectives' outputs may be invalid.
        """
        self._works.settle()

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
        patches.release_waits()
        with self._lock:
            self._owned = True
            self._is_aborted = False
            self._works = self._open_works()
            self._where = f"generation {spec.generation} on rank {spec.rank} of {spec.size}"
            self._silence_s = spec.silence_s
            self._footprint = Footprint(spec.store_port if spec.size > 1 else None)
            self._watch = BuildWatch(
                self._footprint,
                timeout_s,
                self._building_is_stuck,
                ranks=spec.size,
                silence_s=spec.silence_s,
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
            meet(store, spec, give_up, deadline_s=deadline_s, mesh=self._mesh)
        left_s = max(BUILD_MIN_S, deadline_s - SYSTEM_CLOCK.monotonic())
        self._initialize(PrefixStore(spec.nonce, store), spec.rank, spec.size, left_s)
        # From here on the timeout limits the duration of a step, not the wait for absent peers.
        timeout = datetime.timedelta(seconds=timeouts.collective_of_environment(os.environ))
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
        forks.cover(self._covered)

    def _clear_away(self, error: BaseException) -> None:
        # The frames hold the half-built group, and the store's port.
        traceback.clear_frames(error.__traceback__)
        if self._is_on_stream:
            self.abort()  # destroying a communicator waits for peers, and they may be gone
        self.destroy(is_for_next=True)

    def _initialize(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        if self._is_on_stream:
            leave_errors_to_us(os.environ, is_in_process=self._footprint is not None)
        hook = patches.TorchExceptHook()
        dist.init_process_group(
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
                limit_s = timeouts.ABORT_S
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
            f"{timeouts.GIVEN_UP_BUILD_S:g} s",
            self._journal,
        )

    # -- the environment ----------------------------------------------------------------------

    def form(self) -> World:
        """Build the group that the environment describes, and agree on values that it lacks."""
        world = world_from_environment()
        self._works = self._open_works()
        if dist.is_initialized():  # the script had created a group itself
            warn_of_a_shared_store(os.environ)
            world = dataclasses.replace(world, rank=dist.get_rank(), size=dist.get_world_size())
            nonce = broadcast_json(fresh_nonce() if world.rank == 0 else None)
            return dataclasses.replace(world, nonce=world.nonce or str(nonce))
        timeout_s = timeouts.collective_of_environment(os.environ)
        store = store_of_launcher(world, timeout_s)
        if not world.nonce:
            nonce = agree_on_nonce(store, world.rank, world.size, timeout_s=timeout_s)
            world = dataclasses.replace(world, nonce=nonce)
        self._initialize(PrefixStore(world.nonce, store), world.rank, world.size, timeout_s)
        self._owned = True
        return world

    # -- the end ------------------------------------------------------------------------------

    def destroy(self, *, is_for_next: bool = False) -> None:
        """Destroy the group, unless the script has created it. Main thread only.

        Never hangs on gloo: a group whose collectives do not return is leaked (see
        :mod:`elastic.process_group.pending`). On NCCL, :meth:`abort` it first if a peer may be
        gone: otherwise, before another group (``is_for_next``), a deadline ends the process. At
        the end of a job peers have no deadline, and the changes to torch are undone.
        """
        self._take_down(is_for_next=is_for_next)
        if not is_for_next:
            patches.restore_waits()

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
        forks.uncover(self._covered)
        if not is_left_behind:
            log_still_open(sockets)

    def _dissolve(self, is_for_next: bool) -> bool:
        """Destroy the group, if there is one; False if it had to be leaked."""
        have_ended(torch_private.groups(), self._where)
        is_gone = not dist.is_initialized() or self._destroy_group(is_for_next)
        patches.reset_group_count()
        return is_gone

    def _destroy_group(self, is_for_next: bool) -> bool:
        """Destroy the group; False if it had to be leaked."""
        is_drained = self._works.drain(DRAIN_S)
        if not is_drained:
            leak(torch_private.default_group())
        if self._is_on_stream and self._is_aborted:
            with self._limited("aborting", timeouts.ABORT_S):
                # Not destroy: that waits for queued operations.
                torch_private.abort_groups()
        elif self._is_on_stream and is_for_next:
            with self._limited("destroying", timeouts.DESTROY_S):
                dist.destroy_process_group()
        else:
            dist.destroy_process_group()
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
