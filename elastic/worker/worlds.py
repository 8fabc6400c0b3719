"""The worlds that a worker receives, and what it reports of itself."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic import torch_private
from elastic.errors import (
    SYSTEM_CLOCK,
    Clock,
    ConfigError,
    GroupBuildFailed,
    LinkError,
    TrainingError,
)
from elastic.groups.faults import unreachable_peers
from elastic.groups.world import ReplicaMesh, World, node_name
from elastic.hangs import stacks
from elastic.hangs.page import Phase, phases, step_windows
from elastic.hangs.verdict import parse
from elastic.link.link import (
    COUNTED,
    Assignment,
    CollectiveFailure,
    CountEvents,
    Entered,
    Exiting,
    FlightAsk,
    FlightTrace,
    FolderAnswer,
    FolderAsk,
    Heartbeat,
    InTraining,
    Leave,
    Left,
    LinkClient,
    MeasureSteps,
    Message,
    Permit,
    ProfileSteps,
    ProgressPage,
    Ready,
    ReplicaJoin,
    ReplicaPending,
    ReplicaRendezvous,
    SigtermAnswer,
    SigtermAsk,
    StepReport,
)
from elastic.telemetry.events import Event
from elastic.telemetry.log import get_logger
from elastic.tracebacks import described
from elastic.tuning.intervals import (
    LINK_CLOSE_S,
    WORKER_SLICE_S,
)
from elastic.wire.messages import world_variables

# A worker asks for the job's checkpoint folder again: etcd may not have answered its agent.
FOLDER_ASK_S = 1.0
# Polling interval for a newer world where the thread that receives it cannot be woken.
WORLD_LOOK_S = 0.005

# ----------------------------------------------------------------------------
# Calls that may block, beside the link's thread, which must receive worlds in the meantime.


class SingleCall:
    """At most one call at a time, on a thread of its own. Its owner calls ``close``."""

    def __init__(self, thread_name: str) -> None:
        self._name = thread_name
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[..., object], *arguments: object) -> None:
        """Start a call, unless the previous one has not returned. On the link's thread only."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=call, args=arguments, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a pending call, but only for LINK_CLOSE_S: it may be blocked."""
        if self._thread is not None:
            self._thread.join(LINK_CLOSE_S)


# ----------------------------------------------------------------------------
# Sends this worker's recent collectives, from torch's flight recorder, at the agent's request.
#
# It does so on a separate thread: the recorder queries the device for the state of each
# collective, and a hung device may not respond. The link's thread must receive worlds in the
# meantime.


class FlightRecorder:
    """One per process. Its owner calls ``close``."""

    def __init__(self, send: Callable[[FlightTrace], object], clock: Clock = SYSTEM_CLOCK) -> None:
        self._send = send
        self._clock = clock
        self._world = (0, 0)  # the generation, and its start (wall clock, ns)
        self._call = SingleCall("elastic-flight-recorder")

    def enter_generation(self, generation: int) -> None:
        """Ignore earlier records: they belong to another world, whose groups also count from 1."""
        self._world = generation, int(self._clock.wall() * 1e9)

    def dump(self) -> None:
        """Start to send the records, unless the previous response is still pending. Called on the
        link's thread only."""
        self._call.start(self._dump, *self._world)

    def close(self) -> None:
        """Wait for a pending response, but not for long: the device may hang."""
        self._call.close()

    def _dump(self, generation: int, since_ns: int) -> None:
        try:
            dumps = torch_private.flight_recorder_dumps()
            newest, began_ns = self._world  # maybe a later world, if this thread was slow
            entries = parse(dumps, since_ns, began_ns if newest != generation else None)
            self._send(FlightTrace(generation=generation, entries=entries))
        except (RuntimeError, LinkError) as error:  # a hang report without it is better than none
            get_logger().warning("the flight recorder's dump failed: %s", error)


# ----------------------------------------------------------------------------
# What a worker provides for hang detection: its progress page, and its stacks.


def offer_page() -> ProgressPage | None:
    """Keep a progress page from now on, and return the message with its descriptors for the agent.

    None if the page or the stacks could not be created; then the worker's hangs go undetected.
    """
    try:
        page_fd = phases.start()
        source = _offer_stacks()
    except OSError as error:
        get_logger().warning("hangs of this worker will not be detected: %s", error)
        return None
    _watch_batches()
    return ProgressPage(fd=page_fd, stacks_fd=source.fd, stacks_signal=source.signum)


@functools.cache  # once per process
def _offer_stacks() -> stacks.StackSource:
    return stacks.offer()


@functools.cache
def _watch_batches() -> None:
    torch_private.watch_batches(lambda _: phases.enter_batch(), phases.enter)


# ----------------------------------------------------------------------------
# The world that the agent has assigned to this worker, for the training code and for programs.


def world_of(assignment: Assignment, mesh: ReplicaMesh) -> World:
    """The world, as the training code uses it."""
    return World(
        generation=assignment.generation,
        nonce=assignment.nonce,
        lineage=assignment.lineage,
        rank=assignment.rank,
        size=assignment.size,
        local_rank=assignment.local_rank,
        local_size=assignment.local_size,
        node=node_name(),
        is_launched=True,
        mesh=mesh,
    )


def write_environment(assignment: Assignment) -> None:
    """Set the environment variables that torchrun would have set, had it started this world."""
    variables = world_variables(
        assignment,
        rank=assignment.rank,
        size=assignment.size,
        local_size=assignment.local_size,
        node_rank=assignment.node_rank,
        nodes=assignment.nodes,
        store_host=assignment.store_host,
        store_port=assignment.store_port,
    )
    os.environ.update(variables)


# ----------------------------------------------------------------------------
# Receives worlds from the agent, and reports to it: the worker's end of the link.
#
# The link's thread receives a new world and aborts the collectives of the old one; the main thread
# checks whether to continue, and waits here for the next world.

AGENT_DIED_EXIT_CODE = 1


class ToAgent(Protocol):
    """The sending side of a :class:`~elastic.link.link.LinkClient`."""

    def send(self, message: Message) -> None: ...
    def send_heartbeat(self, heartbeat: Heartbeat) -> None: ...
    def close(self) -> None: ...


class Worlds:
    """One per worker process whose agent offers a link (``ELASTIC_LINK``). ``in_process``: whether
    that agent announces worlds to workers that keep their processes, or restarts them."""

    def __init__(
        self,
        *,
        abort: Callable[[], None],
        position: Callable[[], Heartbeat],
        current_step: Callable[[], int | None],
        in_process: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.in_process = in_process
        self._abort = abort
        self._position = position
        self._current_step = current_step
        self._clock = clock
        self._changed = threading.Condition()
        self._newest: Assignment | Leave | None = None
        self._entering = 0  # the generation that the main thread is in, or is building
        self._forming_at: int | None = None  # the switch step of the world that is being formed
        self._sent_ready = False
        self._has_reported_end = False  # of this process
        self._is_in_training = False  # as reported
        self.has_left = False  # this worker only waits to be ended
        self.is_job_left = False  # the next world has no members: all nodes leave
        self.on_job_left: Callable[[], object] = lambda: None  # called once, by the link's thread
        self.is_waiting = False  # the main thread waits for a world
        self._permitted_until_s = math.inf  # by clock.boottime(); no agent has set a limit yet
        self._leaving_answer: bool | None = None
        self._job_folder: str | None = None  # the agent's answer
        self._client: ToAgent | None = None
        self.on_profile: Callable[[ProfileSteps], object] = lambda request: None
        self.on_heartbeat: Callable[[], object] = lambda: None
        # The largest world with which the script can train, as far as is known; 0: no limit.
        self.max_ranks: Callable[[], int] = lambda: 0
        self._flights = FlightRecorder(self.send, clock)
        self._counts_events = False  # the agent has metrics
        self._rendezvous: ReplicaRendezvous | None = None  # of this worker's replica
        self._replica_is_pending = False  # the replica waits for other nodes

    def connect(self, path: str, *, local_rank: int) -> None:
        """Connect to the agent. Raises LinkError if it does not answer."""
        self.attach(
            LinkClient.connect(
                path,
                local_rank=local_rank,
                on_message=self.receive,
                on_agent_death=_die,
                heartbeat=self._heartbeat,
            )
        )
        if (page := offer_page()) is not None:
            self.send(page)

    def attach(self, client: ToAgent) -> None:
        """Use this client to send to the agent; :meth:`close` closes it."""
        self._client = client

    def fail(self, error: str, exit_code: int) -> None:
        """Report that this process is about to end with an error: the agent excludes it at once."""
        self._has_reported_end = True
        step = self._position().step
        self.send(Exiting(clean=False, error=error, step=step, exit_code=exit_code))

    def close(self, *, clean: bool, error: str = "") -> None:
        """Report that the process is about to end, and close the link."""
        self._flights.close()
        if self._client is not None:
            if not self._has_reported_end:
                self._client.send(Exiting(clean=clean, error=error, step=self._position().step))
            self._client.close()

    # -- called by the main thread -------------------------------------------------------------

    @property
    def entering(self) -> int:
        """The generation that the main thread is in, or is building; 0 before the first."""
        return self._entering

    @property
    def has_newer(self) -> bool:
        """Whether a world newer than the current one is known, planned or not."""
        newest = self._newest
        return newest is not None and newest.generation > self._entering

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether the next world excludes this worker."""
        return self.has_newer and isinstance(self._newest, Leave)

    @property
    def nodes(self) -> int:
        """The number of nodes of the newest known world; 0 before the first."""
        return self._newest.nodes if self._newest is not None else 0

    @property
    def nodes_leaving(self) -> int:
        """The number of nodes of the current world that are not in the newest known one."""
        return self._newest.nodes_leaving if self._newest is not None else 0

    def is_superseded(self) -> bool:
        """Whether the current world has ended: a newer one must be entered at once."""
        newest = self._newest
        return (
            newest is not None
            and newest.generation > self._entering
            and (newest.switch_at_step is None or self._replaces_current(newest))
        )

    def _replaces_current(self, newer: Assignment | Leave) -> bool:
        """Whether a planned world begins at the boundary at which the current one, which is still
        being formed, was planned to begin.

        A peer has died in the meantime, so the current world will never be complete. gloo's
        collectives then fail; those on a stream wait indefinitely.
        """
        forming_at, at = self._forming_at, newer.switch_at_step
        return forming_at is not None and at is not None and at <= forming_at

    def is_due(self, step: int) -> bool:
        """Whether another world must be entered before ``step`` begins."""
        newest = self._newest
        if newest is None or newest.generation <= self._entering:
            return False
        return newest.switch_at_step is None or step >= newest.switch_at_step

    def is_permitted(self) -> bool:
        """Whether this worker may begin a step or commit a save: no world can have been formed
        without its node."""
        return self._clock.boottime() <= self._permitted_until_s

    def wait_until_permitted(self) -> None:
        """Before a step: wait while the permission to train has expired.

        The agent extends it while it runs and its node is not considered lost. A frozen agent does
        not, and after a while the other nodes may train without this one. Also returns when the
        current world has ended: then the next one must be entered.
        """
        if self._clock.boottime() > self._permitted_until_s:
            self._wait_for_permission()

    def _wait_for_permission(self) -> None:
        get_logger().warning(
            "training waits: this worker's agent has not renewed the permission to train. The "
            "agent is stopped or frozen, or cannot reach etcd; other nodes may continue without it"
        )
        while not self.is_permitted() and not (self._entering and self.is_superseded()):
            with self._changed:
                self._changed.wait(WORKER_SLICE_S)
        if self.is_permitted():
            get_logger().warning("training continues: the agent is back")

    def next(self) -> Assignment | Leave:
        """Wait for a world newer than the current one, and make it the current one.

        Raises ConfigError if a replica spans several nodes and elastic.join() was called without a
        mesh.
        """
        _require_mesh(os.environ, is_formed=self._rendezvous is not None)
        phases.enter(Phase.NO_WORLD)
        with self._changed:
            if not self._sent_ready:
                self._sent_ready = True
                self.send(Ready(max_ranks=self.max_ranks()))
            while True:
                newest = self._newest
                if newest is not None and newest.generation > self._entering:
                    self._forming_at = newest.switch_at_step
                    self.is_waiting = False
                    self._enter(newest.generation)
                    return newest
                self.is_waiting = True
                self._changed.wait(WORKER_SLICE_S)

    def rendezvous_of_replica(
        self, size: int, timeout_s: float, *, mesh: str = "", on_device: bool = False
    ) -> ReplicaRendezvous:
        """Wait for all ranks of this worker's replica, and return their store.

        ``timeout_s`` limits the wait for ranks on this node; the wait for other nodes has no limit.
        Raises TrainingError if ranks on this node do not join in time.
        """
        self.send(ReplicaJoin(size=size, mesh=mesh, on_device=on_device))
        deadline_s = self._clock.monotonic() + timeout_s
        with self._changed:
            while self._rendezvous is None:
                if self._clock.monotonic() > deadline_s and not self._replica_is_pending:
                    raise TrainingError(
                        f"the other ranks of this node did not call elastic.join(mesh=…) with a "
                        f"replica of {size} ranks within {timeout_s:g} s",
                        hint="every worker on a node must call elastic.join() with the same mesh",
                    )
                self._changed.wait(WORKER_SLICE_S)
            return self._rendezvous

    def job_folder(self, own: str) -> str:
        """The checkpoint folder of the job's first worker; ``own``, this process's, if it is that.

        Waits for the agent while etcd does not answer: no other folder would be right.
        """
        with self._changed:
            while self._job_folder is None:
                self.send(FolderAsk(folder=own))
                self._changed.wait_for(lambda: self._job_folder is not None, FOLDER_ASK_S)
            return self._job_folder

    def wait_for_newer(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait for a world newer than the current one, and call ``meanwhile`` periodically."""
        while not self.has_newer:
            self.is_waiting = True
            meanwhile()
            with self._changed:
                if not self.has_newer:
                    self._changed.wait(WORKER_SLICE_S)
        self.is_waiting = False

    def formed(self, generation: int) -> None:
        """Record that this rank is in the world of its environment. (Restart mode enters others by
        restarting.)"""
        with self._changed:
            self._enter(generation)

    def _enter(self, generation: int) -> None:
        self._entering = generation
        phases.enter_generation(generation)
        self._flights.enter_generation(generation)

    # -- reports of the main thread ------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send to the agent, if there is one."""
        if self._client is not None:
            self._client.send(message)

    def count(self, event: Event) -> None:
        """Send an event of this process to the agent, if the agent counts events of its kind."""
        if self._counts_events and isinstance(event, COUNTED):
            self.send(event)

    def report_position(self) -> None:
        """Send a heartbeat now, before the next one is due."""
        if self._client is not None:
            self._client.send_heartbeat(self._position())

    def entered(self, step: int) -> None:
        """Report that this rank is in the current world, with ``step`` steps committed."""
        self._forming_at = None
        self.send(Entered(generation=self._entering, step=step))

    def report_failure(self, error: BaseException) -> None:
        """Report that a collective of the current world failed, or that its group could not be
        built. Does nothing if that world is already known to have ended."""
        if self.is_superseded():
            return
        missing = error.missing if isinstance(error, GroupBuildFailed) else ()
        text = described(error)
        self.send(
            CollectiveFailure(
                generation=self._entering,
                error=text,
                missing=missing,
                unreachable=unreachable_peers(error),
            )
        )

    def in_training(self, is_in_training: bool) -> None:
        """Report that the script's training has begun, or has ended: from then on, or until then,
        this process may end with exit code 0 while others train."""
        if is_in_training != self._is_in_training:
            self._is_in_training = is_in_training
            self.send(InTraining(value=is_in_training))

    def left(self, step: int) -> None:
        """Report that this rank has left at a step boundary, as requested."""
        self.has_left = True
        self.send(Left(step=step))

    def is_node_leaving(self, timeout_s: float) -> bool:
        """Ask the agent, after SIGTERM: torchrun also sends it to the siblings of a dead worker."""
        deadline_s = self._clock.monotonic() + timeout_s
        self._leaving_answer = None
        self.send(SigtermAsk())
        while self._leaving_answer is None and self._clock.monotonic() < deadline_s:
            self._clock.sleep(WORLD_LOOK_S)
        return self._leaving_answer is True

    # -- the link's thread --------------------------------------------------------------------

    def _heartbeat(self) -> Heartbeat:
        self.on_heartbeat()
        if (times := step_windows.take()) is not None:
            self.send(StepReport(times=times))
        return self._position()

    def receive(self, message: Message) -> None:
        """Handle a message from the agent."""
        match message:
            case Assignment() | Leave():
                self._accept(message)
            case SigtermAnswer(leaving=leaving):
                self._leaving_answer = leaving
            case FolderAnswer(folder=folder):
                with self._changed:
                    self._job_folder = folder
                    self._changed.notify_all()
            case Permit(until_s=until_s):
                with self._changed:
                    self._permitted_until_s = until_s
                    self._changed.notify_all()
            case ReplicaRendezvous():
                with self._changed:
                    self._rendezvous = message
                    self._changed.notify_all()
            case ReplicaPending():
                self._replica_is_pending = True
            case FlightAsk():
                self._flights.dump()
            case MeasureSteps(window_s=window_s):
                step_windows.measure(window_s)
            case ProfileSteps():
                self.on_profile(message)
            case CountEvents():
                self._counts_events = True
            case _:
                pass

    def _accept(self, newer: Assignment | Leave) -> None:
        with self._changed:
            newest = self._newest
            if newest is not None and newer.generation <= newest.generation:
                return
            self._newest = newer
            # Under the lock, so that only the old group can be aborted: the main thread takes the
            # lock before it builds the next one.
            if self._entering and self._must_abort(newer):
                self._abort()
            self._changed.notify_all()
            is_first = not self.is_job_left
            self.is_job_left = isinstance(newer, Leave) and newer.nodes == 0
        if self.is_job_left and is_first:
            self.on_job_left()

    def _must_abort(self, newer: Assignment | Leave) -> bool:
        if newer.generation <= self._entering:
            return False
        if newer.switch_at_step is not None and not self._replaces_current(newer):
            # Late: the others have left at that step, and this rank waits for them in its
            # collectives.
            step = self._current_step()
            return step is not None and step >= newer.switch_at_step
        # At the end of a job, ranks leave at their next boundary, without an abort.
        return isinstance(newer, Assignment) or newer.nodes > 0


def _require_mesh(environ: Mapping[str, str], *, is_formed: bool) -> None:
    """Raise ConfigError if a replica spans several nodes and is not formed: torch's default group
    needs its ranks."""
    replica_size, workers = environ.get("ELASTIC_REPLICA_SIZE"), environ.get("LOCAL_WORLD_SIZE")
    if replica_size and workers and int(replica_size) > int(workers) and not is_formed:
        raise ConfigError(
            f"in-process mode with replica_size={replica_size} and {workers} workers on this node: "
            "a replica that spans several nodes needs elastic.join(mesh=…)",
            hint=f'elastic.join(mesh={{"shard": {replica_size}}}), or start the agents with '
            "--rdzv-conf=mode=restart (docs/how-to/sharded.md)",
        )


def _die() -> None:
    """End this process, since nothing would restart or end it after its agent's death."""
    # stderr may be a pipe that only the agent has read: a failing write must not keep the process.
    with contextlib.suppress(OSError):
        os.write(2, b"elastic: the agent of this worker has died; the worker ends\n")
    os._exit(AGENT_DIED_EXIT_CODE)
