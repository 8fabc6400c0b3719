"""The script's callbacks for new worlds."""

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
        """Call ``callback`` for each world whose state is restored, including the current one."""
        self._on_world.append(callback)
        if self._world is not None:
            callback(self._world)

    def on_main(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever this rank becomes rank 0; immediately if it is."""
        self._on_main.append(callback)
        if self._world is not None and self._world.rank == 0:
            callback()

    def begin_attempt(self, *, is_again: bool) -> None:
        """Forget the callbacks that the function of ``run.retry`` registered in its previous
        call."""
        if is_again:
            of_worlds, of_main = self._before_attempts
            del self._on_world[of_worlds:]
            del self._on_main[of_main:]
        self._before_attempts = len(self._on_world), len(self._on_main)

    def begin(self, world: World) -> None:
        """Call the listeners: a world has begun, and its state is restored."""
        was_main = self._world is not None and self._world.rank == 0
        self._world = world
        for callback in self._on_world:
            callback(world)
        if world.rank == 0 and not was_main:
            for promote in self._on_main:
                promote()
