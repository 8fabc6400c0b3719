"""Warns of counters of steps that are neither in ``run.state`` nor in a tracked object.

``self.global_step += 1`` in a trainer, or a global variable: it is 0 on a joining node, and counts
a repeated step twice on the others. So is an attribute of a tracked object that its ``state_dict``
lacks, such as the number of updates of an average. It is not refused, because a count that is only
printed does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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
            key = f"{path}.{name}" if path else name
            if type(value) is int and self._counts_steps(key, value):
                self._warn(
                    key,
                    "is not part of the job's state",
                    f'Use run.state["{name}"] if it is more than printed',
                )

    def observe_tracked(self, name: str, one: Any) -> None:
        """Called for each tracked object and each step of a search."""
        if self._has_warned or not _is_of_script(type(one)):
            return
        counts = {n: v for n, v in getattr(one, "__dict__", {}).items() if type(v) is int}
        saved = _integers(one.state_dict()) if counts else set()
        for attribute, value in counts.items():
            if value not in saved and self._counts_steps(f"{name}.{attribute}", value):
                self._warn(
                    f"{name}.{attribute}",
                    f"is not in the state_dict of {name}",
                    f"Add it to state_dict and load_state_dict of {type(one).__name__}",
                )

    def _counts_steps(self, key: str, value: int) -> bool:
        last, steps = self._counts.get(key, (value, 0))
        steps = steps + 1 if value == last + 1 else 0
        self._counts[key] = value, steps
        return steps >= _STEPS and not self._has_warned

    def _warn(self, key: str, what: str, remedy: str) -> None:
        self._has_warned = True
        get_logger().warning(
            "%s counts steps, but %s: after a death it is 0 on a joining node, and counts a "
            "repeated step twice. %s",
            key,
            what,
            remedy,
        )


def _integers(saved: object) -> set[int]:
    """The integers in a state_dict: numbers, and tensors with one."""
    if isinstance(saved, dict):
        return set().union(*map(_integers, saved.values()))
    if isinstance(saved, (list, tuple)):
        return set().union(*map(_integers, saved))
    if isinstance(saved, torch.Tensor) and saved.numel() == 1 and saved.device.type == "cpu":
        return {int(saved)} if not saved.is_floating_point() else set()
    return {saved} if isinstance(saved, int) else set()


def _variables(path: str, one: object, assigned: frozenset[str]) -> Mapping[str, Any]:
    """The attributes of an object of the script's own class, or global variables."""
    if isinstance(one, dict) and not path:
        return {name: one[name] for name in assigned & one.keys()}
    if isinstance(one, nn.Module) or not _is_of_script(type(one)):
        return {}
    return dict(getattr(one, "__dict__", {}))


def _is_of_script(kind: type) -> bool:
    return kind.__module__ == "__main__"
