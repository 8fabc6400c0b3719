"""The callbacks of the script that are called after each step."""

from __future__ import annotations

from collections.abc import Callable

from elastic.training.step import Step

Callback = Callable[[Step], object]


class StepCallbacks:
    """``run.after_step``: in the order of their registration."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []
        self._before_attempts = 0

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callback) -> None:
        """Call back after each step."""
        self._callbacks.append(callback)

    def last(self, count: int) -> list[Callback]:
        """The last ``count`` of them."""
        return self._callbacks[len(self._callbacks) - count :] if count else []

    def begin_attempt(self, *, is_again: bool) -> None:
        """The function that ``run.retry`` calls begins, again: what its earlier call has
        registered is registered anew."""
        if is_again:
            del self._callbacks[self._before_attempts :]
        self._before_attempts = len(self._callbacks)
