"""What the training loop changes and the job does not save.

The state of a job is what it saves: wrapped modules, tracked objects, ``run.state``. A joining node
gets nothing else, and a step that is repeated finds everything else as the interrupted step left
it. So whatever else a loop changes from step to step, and reads again, makes results wrong after a
fault, without an error.

:class:`ChangeDetector` asks one question, before a few steps: what that the training function can
reach has changed, and is no state? It looks at

- tensors of the shapes of the weights, which are refused if they average the weights;
- random generators, buffers of modules, and numbers that count or decay, of which one warning
  names all that changed, with the line that saves each. Numbers that are only reported cause none.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastic.errors import TrainingError
from elastic.groups.world import World
from elastic.telemetry.log import get_logger
from elastic.train.carried import CarriedVariable, refuse_carried
from elastic.train.checks import (
    assigned_globals,
    decides_on_the_end,
    frames_of_script,
    matters,
    refuse_copies,
    variables,
    warn_of_local_state,
)
from elastic.train.generators import GENERATORS, GeneratorState, state_of
from elastic.train.hooks import Hook
from elastic.train.inlining import is_stateless, plain_name
from elastic.train.origin import is_installed
from elastic.train.state import JobState
from elastic.train.syntax import walk
from elastic.train.untracked import saved_optimizers

# ----------------------------------------------------------------------------
# Finds the objects that the training function can reach: by closures, globals and attributes.

Named = tuple[str, object]

_DEPTH = 6  # objects inside each other
_OBJECTS = 20_000  # visited per search: a few milliseconds
_ENTRIES = 1_000  # longer lists hold data
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    ModuleType,
    BuiltinFunctionType,
    torch.Tensor,
    torch.optim.Optimizer,
)


def reachable(roots: Iterable[Named], *, without: frozenset[int] = frozenset()) -> Iterator[Named]:
    """Objects by breadth-first search, each once, with an expression for it.

    ``without``: ids of objects that are neither yielded nor entered.
    """
    seen = set(without)
    left = deque((name, one, 0) for name, one in roots)
    visited = 0
    while left and visited < _OBJECTS:
        name, one, depth = left.popleft()
        if isinstance(one, _LEAVES) or id(one) in seen:
            continue
        seen.add(id(one))
        visited += 1
        yield name, one
        if depth < _DEPTH:
            left.extend((n, inner, depth + 1) for n, inner in _inside(name, one))


def _inside(name: str, one: Any) -> Iterable[Named]:
    if isinstance(one, dict):  # other mappings may read files: shelve, h5py
        return _of_dict(name, one) if len(one) <= _ENTRIES else ()
    if isinstance(one, (list, tuple, deque)):
        return [(f"{name}[{i}]", o) for i, o in enumerate(one)] if len(one) <= _ENTRIES else ()
    if isinstance(one, FunctionType):
        return _closure(one)
    if isinstance(one, MethodType):
        return [("self", one.__self__), *_closure(one.__func__)]
    if isinstance(one, functools.partial):
        return [(name, part) for part in (one.func, *one.args, *one.keywords.values())]
    is_module = isinstance(one, nn.Module)
    if not is_module and is_stateless(type(one).__module__):
        return ()
    attributes = getattr(one, "__dict__", {})
    children = [(f"{name}.{key}", value) for key, value in list(attributes.items())]
    if is_module:
        children += [(f"{name}.{key}", child) for key, child in one.named_children()]
    return children


def _of_dict(name: str, entries: dict[Any, Any]) -> list[Named]:
    """A dict named "" holds variables."""
    return [
        (f"{name}[{key!r}]" if name else str(key), value)
        for key, value in list(entries.items())
        if isinstance(key, (str, int))
    ]


def _closure(function: Any) -> list[Named]:
    cells: list[Named] = []
    for name, cell in zip(
        function.__code__.co_freevars, getattr(function, "__closure__", None) or (), strict=False
    ):
        try:
            cells.append((name, cell.cell_contents))
        except ValueError:
            continue  # not assigned yet
    return cells


# ----------------------------------------------------------------------------
# Refuses untracked averages of weights and of gradients: dicts and lists of tensors, and copies of
# a model.
#
# ``self.shadow[name] = decay * self.shadow[name] + (1 - decay) * param.data`` is state of the job:
# a joining node restarts it, and a repeated step applies it twice. Nothing raises an error.
#
# Objects that the training function can reach, and that have tensors of the shapes of a wrapped
# module's parameters, are observed in the first steps, and briefly at powers of two. One is
# refused if twice it has moved towards the weights by one common fraction: the definition of an
# average, and of no gradient, previous value or frozen copy. A few numbers of each
# tensor suffice. (Averages that are modules with a telling name are refused earlier, in
# :mod:`elastic.train.untracked`.)

_FIRST_STEPS = 12  # observed without a pause; then three at each power of two
_SEARCHED = 5  # of these, steps with a search although nothing was found before
_AFTER_A_MATCH = 300  # steps observed after the first match: an update may be rare
_MATCHES = 2
_SAMPLE = 16  # numbers of each tensor
_LEAST = 8  # numbers of all tensors
_MOST_TENSORS = 512
_CLOSE = 0.05  # relative deviation from a common fraction: float32, and a decay of 0.9999
_EXACT = 1e-3  # relative deviation from a sum of gradients: float32
_COPIED = 0.99  # a larger fraction is a copy
_STRAIGHT = 0.9999  # cosine of two updates: the weights move on a line, on which all is a fraction

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class _Observed:
    """The last values of an object, and of the weights that it resembles."""

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    matches: int = 0  # with an average of the weights
    sums: int = 0  # steps in a row as a sum of gradients
    is_module: bool = False


class ChangeDetector(Hook):
    """Finds what the loop changes and the job does not save. One per process.

    ``is_saved``: whether the job has a checkpoint folder.
    """

    def __init__(self, job: JobState, is_saved: Callable[[], bool] = lambda: False) -> None:
        self._job = job
        self._is_saved = is_saved
        self._call: list[Named] = []  # the function of run.retry, and its arguments
        self._callbacks: list[object] = []
        self._is_off = False  # an object of the script cannot be read
        # Where the script's loops begin steps, and which variables they only report.
        self._places: dict[tuple[CodeType, int], list[CarriedVariable]] = {}
        self._is_new_loop = False
        self._is_first_step = True  # of a world
        self._rank = 0
        self._steps = 0
        self._until = _FIRST_STEPS
        self._observed: dict[str, _Observed] = {}
        self._changes: dict[str, _Changes] = {}  # by path
        self._reported: set[str] = set()  # or declared not to matter

    def call(self, function: Any, arguments: Sequence[object], named: Mapping[str, object]) -> None:
        """Search what run.retry's function can reach."""
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        names = list(code.co_varnames[: code.co_argcount] if code is not None else ())
        names = names[isinstance(function, MethodType) :]
        given = zip((*names, *[""] * len(arguments)), arguments, strict=False)
        self._call = [("", function), *given, *named.items()]

    def enter_world(self, world: World, step: int) -> None:
        """See :class:`Hook`."""
        self._rank = world.rank
        self._is_first_step = True

    def add_callback(self, callback: object) -> None:
        """Search what this function can reach, too."""
        self._callbacks.append(callback)

    def is_new_loop(self) -> bool:
        """Whether the step that begins is the first of its loop."""
        return self._is_new_loop

    def ignore(self, paths: Iterable[str]) -> None:
        """These need not be saved."""
        self._reported.update(paths)

    def begin(self, number: int) -> None:
        """See :class:`Hook`. Raises TrainingError for an untracked average or copy, and for a
        variable that the loop carries from step to step."""
        self._steps += 1
        self._read_source(sys._getframe(1))
        if self._is_off:
            return
        is_first, self._is_first_step = self._is_first_step, False
        if is_first and self._rank == 0:
            self._warn_of_reported(sys._getframe(1))
        if self._steps > self._until:
            if self._steps & (self._steps - 1):
                return
            self._until = self._steps + 2
        elif self._steps > _SEARCHED and not self._observed:
            return
        try:
            self._observe()
        except TrainingError:
            raise
        except Exception:  # noqa: BLE001  any object of the script may raise when it is read
            self._is_off = True
            get_logger().info("unsaved changes are not searched for", exc_info=True)

    def _read_source(self, frame: FrameType) -> None:
        """Of each loop of the script, in its first step."""
        first = next(frames_of_script(frame), None)
        place = (first.f_code, first.f_lineno) if first is not None else None
        self._is_new_loop = place is not None and place not in self._places
        if place is None or not self._is_new_loop:
            return
        self._places[place] = []
        try:
            self._places[place] = refuse_carried(
                frame,
                is_saved=self._is_saved(),
                saved=self._saved(),
                counts_continue=self._counts_continue(),
                ignored=self._reported,
                modules=self._modules,
            )
            refuse_copies(self._modules, self._call, frame)
            if self._rank == 0:
                warn_of_local_state(frame)
        except TrainingError:
            raise
        except Exception:  # noqa: BLE001  any object of the script may raise when it is read
            get_logger().info("carried variables are not searched for", exc_info=True)

    def _counts_continue(self) -> bool:
        """Whether ``enumerate`` continues its count where the current loop resumes."""
        loader = self._job.loaders.get(self._job.progress.place)
        return loader is not None and loader.counts_continue

    def _warn_of_reported(self, frame: FrameType) -> None:
        """Where a loop resumes: of what the script has computed of the steps before."""
        if not self._job.progress.step:
            return
        loader = self._job.loaders.get(self._job.progress.place)
        index = loader.position.step if loader is not None else 0
        place = next(((f.f_code, f.f_lineno) for f in frames_of_script(frame) if f), None)
        reported = self._places.get(place, ()) if place is not None else ()
        lost = [c for c in reported if index or not c.is_reset]
        if lost:
            get_logger().warning(
                "this loop resumes at step %d of its epoch, and these variables begin again: %s. "
                "What the script reports of them lacks the steps before. To keep one, put it into "
                'run.state, as an epoch\'s loss: run.state["total"] = 0.0 where the epoch begins, '
                'and in each step run.state["total"] += run.mean(len(batch), loss=loss.item())'
                '["loss"]',
                index,
                ", ".join(dict.fromkeys(map(_shown, lost))),
            )

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
        seen: dict[str, _Observed] = {}
        facts: list[_Fact] = []
        assigned = assigned_globals(sys._getframe(1))
        for path, one in reachable(self._all_roots(), without=self._known(modules)):
            facts += _facts(path, one, assigned)
            pairs = _paired(one, references)
            if not pairs or path in self._reported:
                continue
            observed = seen[path] = self._observed.get(path, _Observed())
            observed.is_module = isinstance(one, nn.Module)
            values, weights = _sampled(pairs)
            follows_gradients = _follows(observed.values[-1:], values, weights, _gradients(pairs))
            observed.sums += 1 if follows_gradients else -observed.sums
            observed.matches += _matches(observed, values, weights)
            if max(observed.matches, observed.sums) >= _MATCHES:
                if not self._is_derived(pairs, values):
                    what = "weights" if observed.matches >= _MATCHES else "gradients"
                    raise _refusal(path, one, self._owner(path), what)
                observed.matches = observed.sums = 0
            if observed.matches:
                self._until = max(self._until, self._steps + _AFTER_A_MATCH)
        self._observed = seen
        for name, tracked in job.tracked.items():
            facts += _unsaved_numbers(name, tracked)
        self._report(facts)

    def _is_derived(self, pairs: Pairs, values: torch.Tensor) -> bool:
        """Whether these are values of tracked objects: the state of an optimizer in a list, or
        ``target.state_dict()``, whose entries the script averages and then loads, so that the next
        step takes them from there."""
        tracked = self._job.all_tracked
        states = [o.state for o in tracked.values() if isinstance(o, torch.optim.Optimizer)]
        kept = {id(v) for one in states for state in one.values() for v in _values_of(state)}
        if all(id(value) in kept for value, _ in pairs):
            return True
        references = [r for module in self._modules for r in _references(module)]
        return any(
            torch.equal(_sampled(others)[0], values)
            for _, one in reachable(tracked.items())
            if (others := _paired(one, references)) is not None
        )

    def _report(self, facts: Iterable[_Fact]) -> None:
        """Warn once of all that has changed in each of the last steps."""
        lines = []
        saved = _numbers_in(self._job.user)  # self.step = run.state["step"] = self.step + 1
        # Some are named where the loop resumes.
        known = {plain_name(c.name) for place in self._places.values() for c in place}
        for fact in facts:
            changes = self._changes.setdefault(fact.path, _Changes(fact))
            is_saved = fact.owner is not None and fact.value in saved
            if changes.next(fact) < _CHANGES or fact.path in self._reported | known or is_saved:
                continue
            self._reported.add(fact.path)
            place = _place(fact, sys._getframe(1)) if fact.owner is not None else ""
            if place is not None:
                at = f" ({place})" if place else ""
                lines.append(f"  {fact.path}{at} {fact.what}: {fact.remedy}")
        if lines and self._rank == 0:
            get_logger().warning(
                "not part of the job's state, but changing in every step: a joining node and a "
                "restarted job begin with the first value, and a repeated step changes it twice. "
                "Save it, or call run.untracked(…) with the names of what does not influence "
                "training\n%s",
                "\n".join(lines),
            )

    def _saved(self) -> frozenset[int]:
        """Ids of the job's state, and of what is inside its optimizers and modules."""
        modules = list(self._job.all_modules.values())
        tensors = self._job.tensors_of_modules()
        tracked = self._job.all_tracked.values()
        optimizers = [o for one in tracked for o in saved_optimizers(one)]
        groups = [group for o in optimizers for group in o.param_groups]
        states = [state for o in optimizers for state in _values_of(o.state)]
        values = [value for one in (*groups, *states) for value in _values_of(one)]
        lists = [one for o in optimizers for one in (o.param_groups, o.state)]
        inside = (*tensors, *optimizers, *lists, *groups, *states, *values)
        kinds = (torch.Tensor, torch.optim.Optimizer, dict, list)  # numbers may be shared
        return self._known(modules) | {id(one) for one in inside if isinstance(one, kinds)}

    @property
    def _modules(self) -> list[nn.Module]:
        return [module.module for module in self._job.modules.values()]

    def roots(self) -> list[object]:
        """What the function of run.retry can reach, that is being called."""
        return [one for _, one in self._all_roots()]

    def _all_roots(self) -> list[Named]:
        roots = [*variables(sys._getframe(1)), self._callbacks]
        return [*(("", root) for root in roots), *self._call]

    def _owner(self, path: str) -> object:
        """The object of which ``path`` is an attribute, or None."""
        name, dot, _ = path.rpartition(".")
        if not dot:
            return None
        return next((one for where, one in reachable(self._all_roots()) if where == name), None)

    def _known(self, modules: Iterable[nn.Module]) -> frozenset[int]:
        """Ids of the job's state: wrapped modules, tracked objects and what they hold."""
        job = self._job
        inside = [m for module in modules for m in module.modules()]
        objects: list[Any] = [*job.all_tracked.values(), *job.local.values(), job.user]
        objects += [o.generator for o in objects if isinstance(o, GeneratorState)]
        tracked = [("", one) for one in objects]
        held = [one for _, one in reachable(tracked)]
        return frozenset(map(id, [*job.modules.values(), *inside, *objects, *held]))


def _shown(carried: CarriedVariable) -> str:
    """A variable with its line, or the object that has several: a meter."""
    owner, dot, name = plain_name(carried.name).partition(".")
    if owner == "self":
        return f"self.{name.partition('.')[0]}"
    return owner if dot else f"{owner} (line {carried.change.lineno})"


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


def _gradients(pairs: Pairs) -> torch.Tensor | None:
    """A few numbers of the gradients of the last step; None if some are not kept."""
    gradients = [p.grad for _, p in pairs[:_MOST_TENSORS]]
    kept = [g for g in gradients if g is not None and _is_readable(g)]
    return _numbers(kept) if len(kept) == len(gradients) else None


def _follows(
    before: Sequence[torch.Tensor],
    values: torch.Tensor,
    weights: torch.Tensor,
    gradients: torch.Tensor | None,
) -> bool:
    """Whether ``values`` are a sum of those of the step before and of the gradients, or of their
    squares: a momentum that the script computes itself. Copies of gradients are no sum, and those
    of the weights, which SAM gives back by ``.data`` before the update, are made in each step."""
    if not before or gradients is None or not before[0].shape == values.shape == gradients.shape:
        return False
    if values.numel() < _LEAST or not bool(torch.isfinite(values).all()):
        return False
    if _rest(values, [weights / weights.norm()] if weights.any() else []) < _EXACT:
        return False
    return any(_is_sum(values, before[0], part) for part in (gradients, gradients.square()))


def _is_sum(values: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are needed, and suffice."""
    parts = [part / part.norm() for part in (one, other) if part.any()]
    if len(parts) < 2 or abs(float(parts[0] @ parts[1])) > _STRAIGHT:
        return False
    second = parts[1] - (parts[1] @ parts[0]) * parts[0]
    alone = min(_rest(values, [part]) for part in parts)
    return alone > _CLOSE and _rest(values, [parts[0], second / second.norm()]) < _EXACT


def _rest(values: torch.Tensor, parts: Sequence[torch.Tensor]) -> float:
    """The relative part of the values outside of the span of orthonormal ``parts``."""
    rest = values
    for part in parts:
        rest = rest - (rest @ part) * part
    return float(rest.norm() / values.norm()) if values.any() else 0.0


def _values_of(state: object) -> Iterable[object]:
    return state.values() if isinstance(state, dict) else ()


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


def _refusal(path: str, one: object, owner: object, what: str) -> TrainingError:
    hint = _hint(path, one, owner, what)
    if what == "gradients":
        hint += f"\n  run.untracked({path!r}), if it does not influence training"
    return TrainingError(
        f"{path} averages the {what}, but is not tracked: a joining node would restart the "
        "average, a repeated step would apply it twice, and a restart would lose it",
        hint=hint,
    )


def _hint(path: str, one: object, owner: object, what: str) -> str:
    name = path.rpartition(".")[2]
    if isinstance(one, nn.Module) and name.isidentifier():
        return f"run.track({name}={path})"
    owners = path.rpartition(".")[0]
    short = owners.rpartition(".")[2]
    if owner is None or not short.isidentifier() or not name.isidentifier():
        if what == "gradients":
            return (
                f"run.state.setdefault({name!r}, …) before the loop, and run.state[{name!r}] in "
                "it; or track a class with state_dict and load_state_dict that holds it"
            )
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


# ----------------------------------------------------------------------------
# Reads what may change: the state of generators, buffers of modules, and numbers.

_CHANGES = 3  # in a row
# Running means of a frozen model are part of how it is used.
_WITHOUT_BUFFERS = frozenset({"torch", "torchvision", "torchmetrics"})
_SAME = 1e-6  # relative difference of two moves of a number: rounding


@dataclass(frozen=True)
class _Fact:
    """A value at one boundary."""

    path: str  # an expression for it
    value: object
    what: str  # that it changes means
    remedy: str
    identity: int = 0  # another one is no change, but another thing
    owner: object = None  # of a number: the object whose attribute it is, or a module's variables


@dataclass
class _Changes:
    """How often in a row a value has changed."""

    fact: _Fact
    times: int = 0
    last_move: float = 0.0
    last_ratio: float = 0.0

    def next(self, fact: _Fact) -> int:
        """The changes in a row, with this value."""
        before, self.fact = self.fact, fact
        if before.identity != fact.identity or before.value == fact.value:
            self.times = 0
        elif isinstance(fact.value, (int, float)) and isinstance(before.value, (int, float)):
            self.times = self._moves(before.value, fact.value)
        else:
            self.times += 1
        return self.times

    def _moves(self, before: float, now: float) -> int:
        """A number counts by one, or decays: what is measured moves irregularly."""
        if isinstance(before, int) and isinstance(now, int):
            return self.times + 1 if now == before + 1 else 0
        move, ratio = now - before, now / before if before else 0.0
        is_alike = _is_close(move, self.last_move) and move % 1.0 != 0.0
        is_alike |= _is_close(ratio, self.last_ratio)
        self.last_move, self.last_ratio = move, ratio
        return self.times + 1 if is_alike or not self.times else 1


def _is_close(one: float, other: float) -> bool:
    return one != 0.0 and abs(one - other) <= _SAME * abs(one)


def _facts(path: str, one: Any, assigned: frozenset[str]) -> Iterator[_Fact]:
    """``assigned``: the global variables that functions of the script assign."""
    if isinstance(one, GENERATORS):
        yield from _state(path, one)
    elif isinstance(one, nn.Module):
        yield from _buffers(path, one)
    elif isinstance(one, dict) and not path:
        yield from _numbers_of(path, {name: one[name] for name in assigned & one.keys()}, one)
    elif _is_of_script(type(one)):
        yield from _numbers_of(path, getattr(one, "__dict__", {}), one)


def _state(path: str, one: Any) -> Iterator[_Fact]:
    seed = 0
    if isinstance(one, torch.Generator):
        if one.device.type != "cpu":
            return
        state, seed = hash(one.get_state().numpy().tobytes()), one.initial_seed()
    else:
        state = hash(repr(state_of(one)))
    # It may be seeded in each step: then its numbers do not depend on what it drew before.
    yield _Fact(path, (state,), "draws random numbers in every step", _DRAW, id(one) ^ seed)


_DRAW = (
    "draw from torch's, NumPy's or random's default generator, which have a seed for each step and "
    "rank, or, for the same numbers on all ranks, from a new generator in each step: "
    'torch.Generator().manual_seed(run.state["step"])'
)


def _buffers(path: str, module: nn.Module) -> Iterator[_Fact]:
    if type(module).__module__.partition(".")[0] in _WITHOUT_BUFFERS:
        return
    buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.is_floating_point()}
    saved = module.state_dict() if buffers else {}
    for name in buffers.keys() & saved.keys():
        total = float(buffers[name].detach().sum(dtype=torch.float64))
        remedy = f"run.track({path.rpartition('.')[2]}={path}) before training"
        yield _Fact(f"{path}.{name}", (total,), f"changes in every step in {path}", remedy)


def _numbers_of(path: str, named: Mapping[str, Any], owner: object) -> Iterator[_Fact]:
    for name, value in list(named.items()):
        if type(value) in (int, float):
            key = f"{path}.{name}" if path else name
            remedy = f'run.state["{key.removeprefix("self.")}"] in its place'
            yield _Fact(key, value, _moves_as(value), remedy, owner=owner)


def _moves_as(value: float) -> str:
    return "counts steps" if isinstance(value, int) else "changes by the same amount in every step"


def _unsaved_numbers(name: str, one: Any) -> Iterator[_Fact]:
    """Attributes of a tracked object that its state_dict lacks."""
    if not _is_of_script(type(one)) or isinstance(one, nn.Module):  # whose numbers are state
        return
    numbers = {n: v for n, v in getattr(one, "__dict__", {}).items() if type(v) is int}
    saved = _numbers_in(one.state_dict()) if numbers else set()
    for attribute, value in numbers.items():
        if value not in saved:
            what = f"counts steps, but is not in the state_dict of {name}"
            remedy = f"add it to state_dict and load_state_dict of {type(one).__name__}"
            yield _Fact(f"{name}.{attribute}", value, what, remedy, owner=one)


def _numbers_in(saved: object) -> set[float]:
    """The numbers in a state, also those in tensors of one number."""
    if isinstance(saved, dict):
        return set().union(*map(_numbers_in, saved.values()))
    if isinstance(saved, (list, tuple)):
        return set().union(*map(_numbers_in, saved))
    if isinstance(saved, torch.Tensor) and saved.numel() == 1 and saved.device.type == "cpu":
        return {saved.item()}
    return {saved} if isinstance(saved, (int, float)) else set()


def _is_of_script(kind: type) -> bool:
    return kind.__module__ == "__main__"


# ----------------------------------------------------------------------------
# Decides from the source whether a number is more than reported, and where it changes.


def _place(fact: _Fact, frame: FrameType | None) -> str | None:
    """Where the script changes a number; "" if unknown; None if it is only reported."""
    name, is_attribute = fact.path.rpartition(".")[2], not isinstance(fact.owner, dict)
    files = dict(_sources(fact.owner, frame))
    place, is_read = "", not files
    for file, tree in files.items():
        parents = {child: node for node in walk(tree) for child in ast.iter_child_nodes(node)}
        for node in walk(tree):
            kind = ast.Attribute if is_attribute else ast.Name
            if not isinstance(node, kind) or getattr(node, "attr", getattr(node, "id", "")) != name:
                continue
            statement = _statement(node, parents)
            if isinstance(node.ctx, ast.Store):
                if isinstance(statement, ast.AugAssign) or not place:
                    place = f"{file}:{node.lineno}"
            elif not _assigns(statement, name) and _influences(node, parents):
                is_read = True
    return place if is_read else None


def _sources(owner: object, frame: FrameType | None) -> Iterator[tuple[str, ast.AST]]:
    """The files of the script's functions that are being called, and of the owner's class."""
    own = [f.__code__ for f in vars(type(owner)).values() if isinstance(f, FunctionType)]
    frames = [f.f_code for f in frames_of_script(frame) if f is not None]
    for file in {code.co_filename for code in (*own, *frames) if not is_installed(code)}:
        if lines := linecache.getlines(file):
            with contextlib.suppress(SyntaxError, ValueError):
                yield file, ast.parse("".join(lines))


def _statement(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.stmt) and node in parents:
        node = parents[node]
    return node


def _assigns(statement: ast.AST, name: str) -> bool:
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return any(name in (getattr(t, "attr", ""), getattr(t, "id", "")) for t in targets)


def _influences(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether more than a report may depend on it; a variable that gets its value counts."""
    is_passed_on = isinstance(parents.get(use), (ast.Assign, ast.Return))
    return is_passed_on or decides_on_the_end(use, parents) or matters(use, parents)
