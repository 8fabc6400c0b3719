"""``Hook``: a part that follows training, from step to step and from world to world.

:func:`elastic.train.run.assemble` installs them, in the order in which they are called. What
training itself consists of, such as gradients, saving and recovery, is no hook: the step loop calls
it by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.groups.world import World
from elastic.tuning.intervals import (
    STEP_SUMS_S,
)

# Why a world is left: it broke, another one is planned, training pauses in it, or the process ends.
Left = Literal["fault", "change", "pause", "close"]


class Hook:
    """Called by the main thread. A method must not take long, and only :meth:`begin` may raise; so
    may the script's own callbacks for worlds, which come last."""

    SEES_EACH_STEP: ClassVar[bool] = True
    """Whether :meth:`commit` is called after each step, or only after a world's first and last step
    and every STEP_SUMS_S in between."""

    def enter_world(self, world: World, step: int) -> None:
        """Training begins or continues in ``world``, after ``step`` steps."""

    def begin(self, number: int) -> None:
        """Step ``number`` is about to begin. May refuse what the script has done since the last
        one, before anything is saved."""

    def commit(self, step: int) -> None:
        """``step`` steps are committed."""

    def leave_world(self, reason: Left) -> None:
        """The world, or the process, ends. Also called where there is no world."""

    def close(self) -> None:
        """The process ends, after :meth:`leave_world`."""


class Hooks:
    """The hooks of a process, in the order in which they are called."""

    def __init__(self, *hooks: Hook, clock: Clock = SYSTEM_CLOCK) -> None:
        self._now_s = clock.monotonic
        self._step = self._notified_step = 0
        self._due_s = float("-inf")  # when hooks that do not see each step are called next
        self.install(hooks)

    def install(self, hooks: Sequence[Hook]) -> None:
        """Call these hooks from now on."""
        self._hooks = tuple(hooks)
        # A step's beginning and commit are worth a microsecond: no calls that do nothing.
        self._begin = tuple(each for each in hooks if type(each).begin is not Hook.begin)
        commit = tuple(each for each in hooks if type(each).commit is not Hook.commit)
        self._commit_each = tuple(each for each in commit if each.SEES_EACH_STEP)
        self._commit_some = tuple(each for each in commit if not each.SEES_EACH_STEP)

    def enter_world(self, world: World, step: int) -> None:
        """See :class:`Hook`; the same applies to the other methods."""
        self._step = self._notified_step = step
        self._due_s = float("-inf")
        for hook in self._hooks:
            hook.enter_world(world, step)

    def begin(self, number: int) -> None:
        for hook in self._begin:
            hook.begin(number)

    def commit(self, step: int) -> None:
        self._step = step
        now_s = self._now_s()
        if now_s >= self._due_s:
            self._due_s = now_s + STEP_SUMS_S
            self._notify()
        for hook in self._commit_each:
            hook.commit(step)

    def leave_world(self, reason: Left) -> None:
        if self._notified_step != self._step:
            self._notify()
        for hook in self._hooks:
            hook.leave_world(reason)

    def close(self) -> None:
        for hook in self._hooks:
            hook.close()

    def _notify(self) -> None:
        self._notified_step = self._step
        for hook in self._commit_some:
            hook.commit(self._step)
