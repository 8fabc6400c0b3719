"""State of one rank: ``run.track(meter=meter, local=True)``.

Meters, metrics and sums of a rank's samples differ between ranks, and belong to none but the rank
itself. They are rolled back with a step, but never sent: a rank that receives the job's state keeps
its own, and a joining rank begins with what its script has created. They are neither compared nor
saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import nn

from elastic import torch_private
from elastic.train.copies import RepeatedCopies, copied, load_tracked
from elastic.train.values import Writing

Position = tuple[int, int, int]
"""Of a boundary: the steps, the passes over loaders, and minus the callbacks that remain."""


_Boundary = tuple[Position, Any]
_SAVES = 4  # the newest checkpoints, from one of which training may continue


def position_of(progress: Mapping[str, Any]) -> Position:
    """The position of a boundary with this progress."""
    return progress["step"], progress["passes"], -progress["callbacks_left"]


class LocalState:
    """The state of this rank's own objects at boundaries to which it may return. One per process.

    ``objects``: by name. The script may replace them, when its function is called again.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._copies = RepeatedCopies()
        self._initial: Any = None
        self._last: _Boundary | None = None
        self._earlier: _Boundary | None = None  # of which this rank has a copy of the weights
        self._saved: deque[_Boundary] = deque(maxlen=_SAVES)

    def states(self) -> Any:
        """Copies of all states, by name."""
        return self._copies.copy({n: _state_of(each) for n, each in self._objects.items()})

    def load(self, states: Mapping[str, Any]) -> None:
        """Load what :meth:`states` has returned. It stays valid."""
        writing = Writing()
        for name in self._objects.keys() & states.keys():
            _load(self._objects[name], copied(states[name]), writing)

    def take(self, at: Position) -> None:
        """A boundary is here."""
        if self._objects:
            self._last = at, self.states()
            self._initial = self._initial or self._last[1]

    def keep(self) -> None:
        """The weights of the last boundary are copied, so that training may be repeated from it."""
        self._earlier = self._last

    def save(self, at: Position) -> None:
        """The job's state is saved here."""
        if self._objects:
            self._saved.append((at, self.states()))

    def restore(self) -> None:
        """Return to the last boundary."""
        if self._last is not None:
            self.load(self._last[1])

    def adopt(self, at: Position) -> None:
        """Training continues from this boundary, with a copy, another rank's state or a checkpoint.

        Return to the newest own boundary that is not after it. If this rank has not completed the
        last step of the others, its part of that step is missing.
        """
        if self._last is None:
            return  # a process that joins: the objects are new
        boundaries = [self._last, *self._saved, *([self._earlier] if self._earlier else [])]
        boundaries.sort(key=lambda each: each[0], reverse=True)
        self.load(next((states for place, states in boundaries if place <= at), self._initial))


def _state_of(tracked: Any) -> Any:
    state: dict[str, Any] = {"state": tracked.state_dict()}
    if isinstance(tracked, nn.Module):
        state["hidden"] = {name: _hidden(part) for name, part in tracked.named_modules()}
    return state


def _load(tracked: Any, state: Any, writing: Writing) -> None:
    with writing.keeping(tracked):
        load_tracked(tracked, state["state"], {})
    if isinstance(tracked, nn.Module):
        for name, part in tracked.named_modules():
            _show(part, state["hidden"].get(name, {}))


# torchmetrics: a Metric is a module, but its sums are plain attributes, which state_dict() leaves
# out unless Metric.persistent() was called; metric_state is their public name. The number of
# updates, by which means are weighted, has none.
_UPDATES, _RESULT = "_update_count", "_computed"


def _hidden(part: nn.Module) -> dict[str, Any]:
    """What a module keeps outside its state_dict."""
    transient = torch_private.transient_buffers_of(part)
    hidden = {n: b for n, b in torch_private.buffers_of(part).items() if n in transient}
    if isinstance(getattr(type(part), "metric_state", None), property):
        states: Any = part.metric_state
        names = (*states, _UPDATES, _RESULT)
        # A MetricCollection's are those of its modules, which have their turn.
        hidden |= {name: vars(part)[name] for name in names if name in vars(part)}
    return hidden


def _show(part: nn.Module, hidden: Mapping[str, Any]) -> None:
    for name, value in hidden.items():
        setattr(part, name, value)
