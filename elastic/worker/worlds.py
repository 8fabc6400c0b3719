"""Worlds from the agent, and reports to it: the worker's end of the link.

The link's thread receives a new world and releases the main thread from the old one; the main
thread checks whether it should continue, and waits here for the next world.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError, TrainingError
from elastic.events import Event
from elastic.hangs.facts import Phase
from elastic.hangs.phases import phases
from elastic.link.client import LinkClient
from elastic.link.protocol import (
    COUNTED,
    CollectiveFailure,
    CountEvents,
    Entered,
    Exiting,
    FlightAsk,
    Heartbeat,
    Left,
    MeasureSteps,
    Message,
    Permit,
    ProfileSteps,
    Ready,
    ReplicaJoin,
    ReplicaMeet,
    ReplicaPending,
    SigtermAnswer,
    SigtermAsk,
    StepReport,
    WorldMessage,
)
from elastic.stragglers.windows import step_windows
from elastic.telemetry.log import get_logger
from elastic.tuning.worker_intervals import WORKER_SLICE_S, WORLD_LOOK_S
from elastic.worker.flight_recorder import FlightRecorder
from elastic.worker.hang_page import offer_page
from elastic.world.faults import GroupBuildFailed, unreachable_peers

AGENT_DIED_EXIT_CODE = 1


class ToAgent(Protocol):
    """What sends to the agent: a :class:`~elastic.link.client.LinkClient`."""

    def send(self, message: Message) -> None: ...
    def send_heartbeat(self, heartbeat: Heartbeat) -> None: ...
    def close(self) -> None: ...


class Worlds:
    """One per worker process whose agent offers a link (``ELASTIC_LINK``)."""

    def __init__(
        self,
        *,
        abort: Callable[[], None],
        position: Callable[[], Heartbeat],
        current_step: Callable[[], int | None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._abort = abort
        self._position = position
        self._step_in_hand = current_step
        self._clock = clock
        self._changed = threading.Condition()
        self._newest: WorldMessage | None = None
        self._entering = 0  # the generation that the main thread is in, or is building
        self._forming_at: int | None = None  # the switch to a world that is not entered yet
        self._said_ready = False
        self.has_left = False  # this worker only waits for its end
        self.is_waiting = False  # the main thread, for a world
        self._permitted_until_s = math.inf  # by clock.boottime(); no agent has set a limit yet
        self._leaving_answer: bool | None = None
        self._client: ToAgent | None = None
        self.on_profile: Callable[[ProfileSteps], object] = lambda asked: None
        self._flights = FlightRecorder(self.send, clock)
        self._counts_events = False  # the agent has metrics
        self._meeting: ReplicaMeet | None = None  # of this worker's replica
        self._replica_is_pending = False  # it waits for other nodes

    def connect(self, path: str, *, local_rank: int) -> None:
        """Perform the handshake. Raises LinkError if the agent does not answer."""
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
        """Send to the agent by this client, and close it at the end."""
        self._client = client

    def close(self, *, clean: bool, error: str = "") -> None:
        """The process is about to end."""
        self._flights.close()
        if self._client is not None:
            self._client.send(Exiting(clean=clean, error=error, step=self._position().step))
            self._client.close()

    # -- called by the main thread -------------------------------------------------------------

    @property
    def entering(self) -> int:
        """The generation that the main thread is in, or is building; 0 before the first."""
        return self._entering

    @property
    def has_newer(self) -> bool:
        """Whether a world after the present one is known, planned or not."""
        newest = self._newest
        return newest is not None and newest.world.generation > self._entering

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether the next world is without this worker."""
        newest = self._newest
        return (
            newest is not None
            and newest.world.generation > self._entering
            and newest.assignment is None
        )

    @property
    def nodes(self) -> int:
        """How many nodes the newest known world has; 0 before the first."""
        return self._newest.nodes if self._newest is not None else 0

    @property
    def nodes_leaving(self) -> int:
        """How many nodes of the present world are not in the newest known one."""
        return self._newest.nodes_leaving if self._newest is not None else 0

    def is_superseded(self) -> bool:
        """Whether the current world has ended: a newer one is to be entered at once."""
        newest = self._newest
        return (
            newest is not None
            and newest.world.generation > self._entering
            and (newest.world.switch_at_step is None or self._takes_the_place(newest))
        )

    def _takes_the_place(self, newer: WorldMessage) -> bool:
        """Whether a planned world is to be entered at the boundary at which the current one, which
        is being formed, was to begin: a peer has died in the meantime, so that one will never be
        complete. gloo's collectives then end with an error; those on a stream wait indefinitely."""
        forming_at, at = self._forming_at, newer.world.switch_at_step
        return forming_at is not None and at is not None and at <= forming_at

    def is_due(self, step: int) -> bool:
        """Whether another world is to be entered before ``step`` begins."""
        newest = self._newest
        if newest is None or newest.world.generation <= self._entering:
            return False
        return newest.world.switch_at_step is None or step >= newest.world.switch_at_step

    def is_permitted(self) -> bool:
        """Whether this worker may begin a step or commit a save: no other world can have been
        formed without its node."""
        return self._clock.boottime() <= self._permitted_until_s

    def wait_until_permitted(self) -> None:
        """Before a step: wait while the permission to train has expired.

        The agent extends it as long as it runs and its node is not given up; a frozen agent does
        not, and after a while the other nodes may train without this one. Also returns when the
        current world has ended: then the next one is to be entered.
        """
        if self._clock.boottime() > self._permitted_until_s:
            self._wait_for_permission()

    def _wait_for_permission(self) -> None:
        get_logger().warning(
            "training waits: this worker's agent has not renewed the permission to train. It is "
            "stopped or frozen, or it no longer reaches etcd; the other nodes may continue without "
            "this one"
        )
        while not self.is_permitted() and not (self._entering and self.is_superseded()):
            with self._changed:
                self._changed.wait(WORKER_SLICE_S)
        if self.is_permitted():
            get_logger().warning("training continues: the agent is back")

    def next(self) -> WorldMessage:
        """Wait for a world newer than the present one, and make it the present one.

        Raises ConfigError where a replica takes several nodes, and elastic.join() had no mesh.
        """
        _require_mesh(os.environ, has_met=self._meeting is not None)
        phases.enter(Phase.NO_WORLD)
        with self._changed:
            if not self._said_ready:
                self._said_ready = True
                self.send(Ready())
            while True:
                newest = self._newest
                if newest is not None and newest.world.generation > self._entering:
                    self._entering = newest.world.generation
                    self._forming_at = newest.world.switch_at_step
                    self.is_waiting = False
                    phases.enter_generation(newest.world.generation)
                    self._flights.enter_generation(newest.world.generation)
                    return newest
                self.is_waiting = True
                self._changed.wait(WORKER_SLICE_S)

    def meet_replica(self, size: int, timeout_s: float, *, mesh: str = "") -> ReplicaMeet:
        """Where the ranks of this worker's replica meet, once all are there: those of this node
        within the time, those of others whenever there are such nodes.

        Raises TrainingError if the former do not come.
        """
        self.send(ReplicaJoin(size=size, mesh=mesh))
        deadline_s = self._clock.monotonic() + timeout_s
        with self._changed:
            while self._meeting is None:
                if self._clock.monotonic() > deadline_s and not self._replica_is_pending:
                    raise TrainingError(
                        f"the other ranks of this node did not call elastic.join(mesh=…) with a "
                        f"replica of {size} ranks within {timeout_s:g} s",
                        hint="every worker of a node joins with the same mesh",
                    )
                self._changed.wait(WORKER_SLICE_S)
            return self._meeting

    def wait_for_newer(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until there is a world newer than the current one; ``meanwhile`` is called
        periodically."""
        while not self.has_newer:
            self.is_waiting = True
            meanwhile()
            with self._changed:
                if not self.has_newer:
                    self._changed.wait(WORKER_SLICE_S)
        self.is_waiting = False

    def formed(self, generation: int) -> None:
        """The world of the environment was entered: any other one is entered by a restart."""
        with self._changed:
            self._entering = generation
        phases.enter_generation(generation)
        self._flights.enter_generation(generation)

    # -- reports of the main thread ------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send to the agent; lost if there is none."""
        if self._client is not None:
            self._client.send(message)

    def count(self, event: Event) -> None:
        """An event of this process: to the agent, if that counts events of this kind."""
        if self._counts_events and isinstance(event, COUNTED):
            self.send(event)

    def report_position(self) -> None:
        """A heartbeat that does not wait until it is due."""
        if self._client is not None:
            self._client.send_heartbeat(self._position())

    def entered(self, step: int) -> None:
        """This rank is in the present world, with ``step`` steps committed."""
        self._forming_at = None
        self.send(Entered(generation=self._entering, step=step))

    def report_failure(self, error: BaseException) -> None:
        """A collective of the current world failed, or its group could not be built. Not reported
        if that world is already known to have ended."""
        if self.is_superseded():
            return
        missing = error.missing if isinstance(error, GroupBuildFailed) else ()
        text = f"{type(error).__name__}: {error}"
        self.send(
            CollectiveFailure(
                generation=self._entering,
                error=text,
                missing=missing,
                unreachable=unreachable_peers(error),
            )
        )

    def left(self, step: int) -> None:
        """This rank has left at a boundary, as requested."""
        self.has_left = True
        self.send(Left(step=step))

    def is_node_leaving(self, timeout_s: float) -> bool:
        """Ask the agent, after a SIGTERM: torchrun also sends it to siblings of dead workers."""
        deadline_s = self._clock.monotonic() + timeout_s
        self._leaving_answer = None
        self.send(SigtermAsk())
        while self._leaving_answer is None and self._clock.monotonic() < deadline_s:
            self._clock.sleep(WORLD_LOOK_S)
        return self._leaving_answer is True

    # -- the link's thread --------------------------------------------------------------------

    def _heartbeat(self) -> Heartbeat:
        if (times := step_windows.take()) is not None:
            self.send(StepReport(times=times))
        return self._position()

    def receive(self, message: Message) -> None:
        """A message of the agent."""
        match message:
            case WorldMessage():
                self._learn(message)
            case SigtermAnswer(leaving=leaving):
                self._leaving_answer = leaving
            case Permit(until_s=until_s):
                with self._changed:
                    self._permitted_until_s = until_s
                    self._changed.notify_all()
            case ReplicaMeet():
                with self._changed:
                    self._meeting = message
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

    def _learn(self, message: WorldMessage) -> None:
        with self._changed:
            newest = self._newest
            if newest is not None and message.world.generation <= newest.world.generation:
                return
            self._newest = message
            # Under the lock, so that it can only hit the old group: the main thread takes the
            # lock before it builds the next one.
            if self._entering and self._must_abort(message):
                self._abort()
            self._changed.notify_all()

    def _must_abort(self, message: WorldMessage) -> bool:
        world = message.world
        if world.generation <= self._entering:
            return False
        if world.switch_at_step is not None and not self._takes_the_place(message):
            # Late: the others have left at that step, and this rank waits for them in it.
            step = self._step_in_hand()
            return step is not None and step >= world.switch_at_step
        # The last ones of a job leave at their next boundary, undisturbed.
        return message.assignment is not None or message.nodes > 0


def _require_mesh(environ: Mapping[str, str], *, has_met: bool) -> None:
    """torch must have the ranks of a replica over several nodes: it is the default group."""
    replica_size, workers = environ.get("ELASTIC_REPLICA_SIZE"), environ.get("LOCAL_WORLD_SIZE")
    if replica_size and workers and int(replica_size) > int(workers) and not has_met:
        raise ConfigError(
            f"recovery in process with replica_size={replica_size} and {workers} workers on this "
            "node, and elastic.join() without mesh=…: a replica that takes several nodes needs one",
            hint=f'elastic.join(mesh={{"shard": {replica_size}}}), or start the agents with '
            "--rdzv-conf=mode=restart (docs/how-to/sharded.md)",
        )


def _die() -> None:
    """The agent is dead: this process would no longer be restarted, counted or ended."""
    os.write(2, b"elastic: the agent of this worker has died; the worker ends\n")
    os._exit(AGENT_DIED_EXIT_CODE)
