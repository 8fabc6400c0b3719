"""What the agent says about worlds, and what the worker tells it: the two ends of the link.

The link's thread hears of a new world and releases the main thread from the old one; the main
thread asks whether it should go on, and waits here for the world to enter next.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.hangs.facts import Phase
from elastic.hangs.phases import phases
from elastic.link.client import LinkClient
from elastic.link.protocol import (
    Bye,
    CollectiveFailure,
    Entered,
    FlightAsk,
    Heartbeat,
    Left,
    MeasureSteps,
    Message,
    Permit,
    Ready,
    SigtermAnswer,
    SigtermAsk,
    StepReport,
    WorldMessage,
)
from elastic.messages.environment import world_variables
from elastic.messages.world import derive
from elastic.secure_channel.keys import SecretKey
from elastic.stragglers.windows import step_windows
from elastic.telemetry.log import get_logger
from elastic.tuning.timeouts import peer_silence_of
from elastic.tuning.worker_intervals import WORKER_SLICE_S, WORLD_LOOK_S
from elastic.worker.flight_recorder import FlightRecorder
from elastic.worker.hang_page import offer_page
from elastic.world.arrival import GroupSpec
from elastic.world.faults import GroupBuildFailed, unreachable_peers
from elastic.world.world import World, node_name

AGENT_DIED_EXIT_CODE = 1


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
        self._client: LinkClient | None = None
        self._flights = FlightRecorder(self.send, clock)

    def connect(self, path: str, *, local_rank: int) -> None:
        """Say hello. Raises LinkError if the agent does not answer."""
        self._client = LinkClient.connect(
            path,
            local_rank=local_rank,
            on_message=self._on_message,
            on_agent_death=_die,
            beat=self._beat,
        )
        if (page := offer_page()) is not None:
            self._client.send(page)

    def close(self, *, clean: bool, error: str = "") -> None:
        """The process is about to end."""
        self._flights.close()
        if self._client is not None:
            self._client.send(Bye(clean=clean, error=error, step=self._position().step))
            self._client.close()

    # -- the main thread asks -----------------------------------------------------------------

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
    def is_told_to_leave(self) -> bool:
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

    def is_superseded(self) -> bool:
        """Whether the present world is over: a newer one is to be entered at once."""
        newest = self._newest
        return (
            newest is not None
            and newest.world.generation > self._entering
            and (newest.world.switch_at_step is None or self._takes_the_place(newest))
        )

    def _takes_the_place(self, newer: WorldMessage) -> bool:
        """Whether a planned world is to be entered at the boundary at which the present one, which
        is being formed, was to begin: somebody has died meanwhile, and it never will. gloo's
        collectives end with an error then; those on a stream wait for ever."""
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

        The agent renews it for as long as it lives and its node is not given up; one that is
        frozen does not, and after a while the other nodes may train without this one. Returns
        also when the present world is over: then the next one is to be entered.
        """
        if self._clock.boottime() > self._permitted_until_s:
            self._wait_for_permission()

    def _wait_for_permission(self) -> None:
        get_logger().warning(
            "training waits: this worker's agent has not renewed the permission to train. It is "
            "stopped or frozen, or it no longer reaches etcd; the other nodes may go on without "
            "this one"
        )
        while not self.is_permitted() and not (self._entering and self.is_superseded()):
            with self._changed:
                self._changed.wait(WORKER_SLICE_S)
        if self.is_permitted():
            get_logger().warning("training goes on: the agent is back")

    def next(self) -> WorldMessage:
        """Wait for a world newer than the present one, and make it the present one."""
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

    def wait_for_newer(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Until there is a world newer than the present one; ``meanwhile`` is called now and
        then."""
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

    # -- the main thread tells ----------------------------------------------------------------

    def send(self, message: Message) -> None:
        """To the agent; lost if there is none any more."""
        if self._client is not None:
            self._client.send(message)

    def entered(self, step: int) -> None:
        """This rank is in the present world, with ``step`` steps committed."""
        self._forming_at = None
        self.send(Entered(generation=self._entering, step=step))

    def report_failure(self, error: BaseException) -> None:
        """A collective of the present world failed, or its group could not be built. Says nothing
        if that world is known to be over."""
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
        """This rank has left at a boundary, as told."""
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

    def _beat(self) -> Heartbeat:
        if (times := step_windows.take()) is not None:
            self.send(StepReport(times=times))
        return self._position()

    def _on_message(self, message: Message) -> None:
        match message:
            case WorldMessage():
                self._learn(message)
            case SigtermAnswer(leaving=leaving):
                self._leaving_answer = leaving
            case Permit(until_s=until_s):
                with self._changed:
                    self._permitted_until_s = until_s
                    self._changed.notify_all()
            case FlightAsk():
                self._flights.dump()
            case MeasureSteps(window_s=window_s):
                step_windows.measure(window_s)
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


def world_of(message: WorldMessage) -> World:
    """The world as the training sees it."""
    return derive(World, message.world, message.assignment, node=node_name(), is_launched=True)


def group_spec(message: WorldMessage) -> GroupSpec:
    """What its process group is built from."""
    return derive(
        GroupSpec,
        message.world,
        message.assignment,
        store_key=SecretKey.parse(message.store_key),
        store_tls=message.store_tls,
        silence_s=peer_silence_of(os.environ),
    )


def write_environment(message: WorldMessage) -> None:
    """What torchrun would have put into the environment, had it started this world."""
    assert message.assignment is not None, "this node is not in the world"
    variables = world_variables(
        message.world,
        message.assignment,
        node_rank=message.node_rank,
        nodes=message.nodes,
        store_host=message.world.store_host,
        store_port=message.world.store_port,
    )
    os.environ.update(variables)


def _die() -> None:
    """The agent is dead: nobody would restart, count or end this process any more."""
    os.write(2, b"elastic: the agent of this worker has died; the worker ends\n")
    os._exit(AGENT_DIED_EXIT_CODE)
