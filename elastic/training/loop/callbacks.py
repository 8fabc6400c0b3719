"""The script's callbacks after each step."""

from __future__ import annotations

from collections.abc import Callable

from elastic.training.step import Step

Callback = Callable[[Step], object]


class StepCallbacks:
    """The callbacks of ``run.after_step``, in order of registration."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []
        self._before_attempts = 0

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callback) -> None:
        """Call ``callback`` after each step from now on."""
        self._callbacks.append(callback)

    def last(self, count: int) -> list[Callback]:
        """The last ``count`` callbacks; all if there are fewer."""
        return self._callbacks[max(0, len(self._callbacks) - count) :]

    def begin_attempt(self, *, is_again: bool) -> None:
        """Forget the callbacks that the function of ``run.retry`` registered in its previous call:
        it registers them again."""
        if is_again:
            del self._callbacks[self._before_attempts :]
        self._before_attempts = len(self._callbacks)
