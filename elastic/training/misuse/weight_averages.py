"""Refuses untracked averages of the weights: dicts and lists of tensors, and copies of a model.

``self.shadow[name] = decay * self.shadow[name] + (1 - decay) * param.data`` is state of the job: a
joining node restarts it, and a repeated step applies it twice. Nothing raises an error.

Objects that the training function can reach, and that have tensors of the shapes of a wrapped
module's parameters, are observed in the first steps, and briefly at powers of two. One is refused
if twice it has moved towards the weights by one common fraction: the definition of an average, and
of no gradient, momentum, previous value or frozen copy. A few numbers of each tensor suffice.
(Averages that are modules with a telling name are refused earlier, in
:mod:`elastic.training.state.untracked`.)
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.training.misuse.frames import assigned_globals, variables
from elastic.training.misuse.reachable import Named, reachable
from elastic.training.misuse.source.copied_weights import refuse_copies
from elastic.training.misuse.source.local_decays import warn_of_decays
from elastic.training.misuse.source.local_state import warn_of_local_state
from elastic.training.misuse.step_counters import StepCounters
from elastic.training.misuse.untracked_buffers import UntrackedBuffers
from elastic.training.misuse.untracked_generators import UntrackedGenerators
from elastic.training.state.job_state import JobState

_FIRST_STEPS = 12  # observed without a pause; then three at each power of two
_SEARCHED = 5  # of these, steps with a search although nothing was found before
_AFTER_A_MATCH = 300  # steps observed after the first match: an update may be rare
_MATCHES = 2
_SAMPLE = 16  # numbers of each tensor
_LEAST = 8  # numbers of all tensors
_MOST_TENSORS = 512
_CLOSE = 0.05  # relative deviation from a common fraction: float32, and a decay of 0.9999
_COPIED = 0.99  # a larger fraction is a copy
_STRAIGHT = 0.9999  # cosine of two updates: the weights move on a line, on which all is a fraction

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class _Observed:
    """The last values of an object, and of the weights that it resembles."""

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    matches: int = 0
    is_module: bool = False


class WeightAverages:
    """Observes what the training function can reach. One per process."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._call: list[Named] = []  # the function of run.retry, and its arguments
        self._callbacks: list[object] = []
        self._is_off = False  # an object of the script cannot be read
        self._steps = 0
        self._until = _FIRST_STEPS
        self._observed: dict[str, _Observed] = {}
        self._buffers = UntrackedBuffers()
        self._counters = StepCounters()
        self._generators = UntrackedGenerators()

    def call(self, function: Any, arguments: Sequence[object], named: Mapping[str, object]) -> None:
        """Search what run.retry's function can reach."""
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        names = list(code.co_varnames[: code.co_argcount] if code is not None else ())
        names = names[isinstance(function, MethodType) :]
        given = zip((*names, *[""] * len(arguments)), arguments, strict=False)
        self._call = [("", function), *given, *named.items()]

    def add_callback(self, callback: object) -> None:
        """Search what this function can reach, too."""
        self._callbacks.append(callback)

    def step_begins(self) -> None:
        """Called before each step. Raises TrainingError for an untracked average or copy."""
        self._steps += 1
        if self._is_off:
            return
        if self._steps > self._until:
            if self._steps & (self._steps - 1):
                return
            self._until = self._steps + 2
        elif self._steps > _SEARCHED and not self._observed:
            return
        try:
            if self._steps == 1:
                refuse_copies(self._modules, self._call, sys._getframe(1))
                warn_of_decays(sys._getframe(1))
                warn_of_local_state(sys._getframe(1))
            self._observe()
        except TrainingError:
            raise
        except Exception:  # noqa: BLE001  any object of the script may raise when it is read
            self._is_off = True
            get_logger().info("untracked averages are not searched for", exc_info=True)

    def copies(self) -> dict[str, str]:
        """Digests of the untracked modules that resemble a wrapped one, by name: a frozen copy must
        be the same on all ranks."""
        return {
            path: hashlib.sha256(observed.values[-1].numpy().tobytes()).hexdigest()[:16]
            for path, observed in self._observed.items()
            if observed.is_module and observed.values
        }

    def _observe(self) -> None:
        job = self._job
        if job.is_sharded or job.built is not None or not job.modules:
            return
        modules = self._modules
        references = [r for module in modules for r in _references(module)]
        found: dict[str, _Observed] = {}
        assigned = assigned_globals(sys._getframe(1))
        for path, one in reachable(self._all_roots(), without=self._known(modules)):
            self._buffers.observe(path, one)
            self._counters.observe(path, one, assigned)
            self._generators.observe(path, one)
            pairs = _paired(one, references)
            if not pairs:
                continue
            observed = found[path] = self._observed.get(path, _Observed())
            observed.is_module = isinstance(one, nn.Module)
            observed.matches += _matches(observed, *_sampled(pairs))
            if observed.matches >= _MATCHES:
                raise _refusal(path, one, self._owner(path))
            if observed.matches:
                self._until = max(self._until, self._steps + _AFTER_A_MATCH)
        self._observed = found
        for name, tracked in job.tracked.items():
            self._counters.observe_tracked(name, tracked)

    @property
    def _modules(self) -> list[nn.Module]:
        return [module.module for module in self._job.modules.values()]

    def _all_roots(self) -> list[Named]:
        found = [*variables(sys._getframe(1)), self._callbacks]
        return [*(("", root) for root in found), *self._call]

    def _owner(self, path: str) -> object:
        """The object of which ``path`` is an attribute, or None."""
        name, dot, _ = path.rpartition(".")
        if not dot:
            return None
        return next((one for found, one in reachable(self._all_roots()) if found == name), None)

    def _known(self, modules: Iterable[nn.Module]) -> frozenset[int]:
        """Ids of the job's state: wrapped modules, tracked objects and what they hold."""
        job = self._job
        inside = [m for module in modules for m in module.modules()]
        tracked = [("", one) for one in (*job.all_tracked.values(), job.user)]
        held = [one for _, one in reachable(tracked)]
        return frozenset(map(id, [*job.modules.values(), *inside, *job.tracked.values(), *held]))


def _references(module: nn.Module) -> list[dict[str, nn.Parameter]]:
    """The parameters that an average may follow: of the module, or of a large part of it."""
    parts = [module, *(c for c in module.children() if len(list(c.parameters())) > 1)]
    return [named for part in parts if (named := dict(part.named_parameters()))]


def _paired(one: object, references: Iterable[dict[str, nn.Parameter]]) -> Pairs | None:
    """The tensors of ``one``, each with the parameter that it resembles."""
    named = _tensors(one)
    if not named:
        return None
    for reference in references:
        trained = {n: p for n, p in reference.items() if p.requires_grad}
        pairs: Pairs = [(named[n], p) for n, p in trained.items() if n in named]
        if not pairs or len(pairs) < len(trained):
            values = list(named.values())
            parameters = list(trained if len(values) == len(trained) else reference)
            if isinstance(one, nn.Module) or len(values) != len(parameters):
                continue
            pairs = [(v, reference[n]) for v, n in zip(values, parameters, strict=True)]
        if all(value.shape == p.shape and value is not p for value, p in pairs):
            return pairs
    return None


def _tensors(one: object) -> dict[str, torch.Tensor]:
    """The floating-point tensors of a dict, a list or a module, by name."""
    if isinstance(one, nn.Module):
        named: dict[object, object] = {**dict(one.named_parameters())}
    elif isinstance(one, dict):
        named = dict(one)
    elif isinstance(one, (list, tuple)):
        named = dict(enumerate(one))
    else:
        return {}
    if len(named) > 4 * _MOST_TENSORS:
        return {}
    return {
        str(i) if isinstance(name, torch.Tensor) else str(name).removeprefix("module."): value
        for i, (name, value) in enumerate(named.items())
        if isinstance(value, torch.Tensor) and _is_readable(value)
    }


def _is_readable(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_plain and tensor.is_floating_point() and not is_lazy(tensor)


def _sampled(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = pairs[:_MOST_TENSORS]
    return _numbers([value for value, _ in pairs]), _numbers([p for _, p in pairs])


def _numbers(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A few numbers of each tensor, read with one transfer from each device."""
    parts = [_first(t.detach()) for t in tensors]
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.float64, device="cpu")


def _first(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() > 1 and tensor.numel() > _SAMPLE:
        tensor = tensor.narrow(0, 0, 1).squeeze(0) if tensor.shape[0] > 1 else tensor.squeeze(0)
    return tensor.reshape(-1)[:_SAMPLE].double()


def _matches(observed: _Observed, values: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether the values have moved as an average does. Remembers them for the next call."""
    before, weights_before = observed.values, observed.weights
    is_same_size = not before or before[-1].shape == values.shape
    observed.values = [*before[-1:], values] if is_same_size else [values]
    observed.weights = [*weights_before[-_FIRST_STEPS:], weights] if is_same_size else [weights]
    if not is_same_size or len(weights_before) < 2 or values.numel() < _LEAST:
        return False
    if any(torch.equal(values, w) for w in observed.weights):
        observed.matches = 0
        return False
    *_, earlier, last = weights_before
    if _cosine(weights - last, last - earlier) > _STRAIGHT:
        return False
    return any(_is_part(values - before[-1], to - before[-1]) for to in (weights, last))


def _is_part(moved: torch.Tensor, distance: torch.Tensor) -> bool:
    """Whether ``moved`` is a common fraction of ``distance``."""
    if not moved.any() or not distance.any() or not bool(torch.isfinite(moved).all()):
        return False
    fraction = float(moved @ distance / (distance @ distance))
    deviation = float((moved - fraction * distance).norm() / moved.norm())
    return 0.0 < fraction < _COPIED and deviation < _CLOSE


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    scale = float(one.norm() * other.norm())
    return float(one @ other) / scale if scale else 1.0


def _refusal(path: str, one: object, owner: object) -> TrainingError:
    return TrainingError(
        f"{path} averages the weights, but is not tracked: a joining node would restart the "
        "average, a repeated step would apply it twice, and a restart would lose it",
        hint=_hint(path, one, owner),
    )


def _hint(path: str, one: object, owner: object) -> str:
    name = path.rpartition(".")[2]
    if isinstance(one, nn.Module) and name.isidentifier():
        return f"run.track({name}={path})"
    owners = path.rpartition(".")[0]
    short = owners.rpartition(".")[2]
    if owner is None or not short.isidentifier() or not name.isidentifier():
        return (
            "average = copy.deepcopy(network); run.track(average=average), or track a class with "
            "state_dict and load_state_dict that holds it"
        )
    short = "ema" if short == "self" else short
    if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
        return f"run.track({short}={owners})"
    return (
        f"run.track({short}={owners}), with these methods in class {type(owner).__name__}:\n"
        "    def state_dict(self):\n"
        f'        return {{"{name}": self.{name}}}\n'
        "    def load_state_dict(self, state):\n"
        f'        self.{name} = state["{name}"]'
    )
