"""Callbacks of the script for new worlds."""

from __future__ import annotations

from collections.abc import Callable

from elastic.world.world import World


class Listeners:
    """``run.on_world`` and ``run.on_main``: called for the current world and every new one."""

    def __init__(self) -> None:
        self._on_world: list[Callable[[World], object]] = []
        self._on_main: list[Callable[[], object]] = []
        self._before_attempts = (0, 0)
        self._world: World | None = None  # the current one, once its state is restored

    def on_world(self, callback: Callable[[World], object]) -> None:
        """Call back for each world whose state is restored, including the current one."""
        self._on_world.append(callback)
        if self._world is not None:
            callback(self._world)

    def on_main(self, callback: Callable[[], object]) -> None:
        """Call back whenever this rank becomes main; immediately if it is."""
        self._on_main.append(callback)
        if self._world is not None and self._world.rank == 0:
            callback()

    def begin_attempt(self, *, is_again: bool) -> None:
        """As :meth:`elastic.training.loop.callbacks.StepCallbacks.begin_attempt`."""
        if is_again:
            of_worlds, of_main = self._before_attempts
            del self._on_world[of_worlds:]
            del self._on_main[of_main:]
        self._before_attempts = len(self._on_world), len(self._on_main)

    def begin(self, world: World) -> None:
        """Call the listeners: a world has begun, and its state is restored."""
        was_main = self._world is not None and self._world.rank == 0
        self._world = world
        for heard in self._on_world:
            heard(world)
        if world.rank == 0 and not was_main:
            for promoted in self._on_main:
                promoted()
