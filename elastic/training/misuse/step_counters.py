"""Warns of counters of steps that are neither in ``run.state`` nor in a tracked object.

``self.global_step += 1`` in a trainer, or a global variable: it is 0 on a joining node, and counts
a repeated step twice on the others. It is not refused, because a count that is only printed does no
harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from elastic.telemetry.log import get_logger

_STEPS = 3  # by one in each


class StepCounters:
    """Observes integers that the training function can reach. One per process."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}  # by path: the value, and steps in a row
        self._has_warned = False

    def observe(self, path: str, one: object, assigned: frozenset[str]) -> None:
        """Called for each object and each step of a search. ``assigned``: the global variables that
        the script assigns; others are those of a loop."""
        if self._has_warned:
            return
        for name, value in _variables(path, one, assigned).items():
            if type(value) is not int:
                continue
            key = f"{path}.{name}" if path else name
            last, steps = self._counts.get(key, (value, 0))
            steps = steps + 1 if value == last + 1 else 0
            self._counts[key] = value, steps
            if steps >= _STEPS:
                self._has_warned = True
                get_logger().warning(
                    "%s counts steps, but is not part of the job's state: after a death it is 0 on "
                    'a joining node, and counts a repeated step twice. Use run.state["%s"] if it '
                    "is more than printed",
                    key,
                    name,
                )
                return


def _variables(path: str, one: object, assigned: frozenset[str]) -> Mapping[str, Any]:
    """The attributes of an object of the script's own class, or global variables."""
    if isinstance(one, dict) and not path:
        return {name: one[name] for name in assigned & one.keys()}
    if isinstance(one, nn.Module) or not _is_of_script(type(one)):
        return {}
    return dict(getattr(one, "__dict__", {}))


def _is_of_script(kind: type) -> bool:
    return kind.__module__ == "__main__"
