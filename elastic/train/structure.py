"""What the modules of a job consist of, and which hooks the script has registered on them.

A process that joins, or that calls the function of run.retry again, runs what the script does
before its loop. So what a loop adds to a module in one of its passes, such as a layer, a parameter
or a hook, a later process lacks, and what a function adds before its loop, a survivor adds twice.
Neither raises an error.

- A layer that grows a model, ``self.weight = nn.Parameter(…)`` in a forward pass (an EMA codebook
  in many VQ-VAEs), pruning that starts in the middle: DDP reduces the parameters that it has seen,
  so ranks would train different models. They are refused, as are an activation that is replaced and
  a hook that is registered once a loop has begun.
- A hook that the function registers again takes the place of its earlier one.

torch reports each registration in a module, and numbers hooks, so a step costs two comparisons. A
buffer may get another tensor: it keeps its name, and nothing reduces it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import CodeType

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from elastic import torch_private
from elastic.errors import TrainingError
from elastic.groups.world import World
from elastic.train.ddp import ElasticDDP
from elastic.train.hooks import Hook
from elastic.train.origin import is_of_script
from elastic.train.state import JobState

_REGISTRATIONS = (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
_MOST_STEPS = 64  # until hooks are looked at again, where each step registers some


class ModuleStructures(Hook):
    """Compares the job's modules with what they were in their first step. One per process.

    ``is_new_loop``: whether the step that begins is the first of its loop in this process.
    """

    def __init__(self, job: JobState, is_new_loop: Callable[[], bool]) -> None:
        self._job = job
        self._is_first = True  # of a world
        self._structures: list[_Structure] = []  # in the order of the job's modules
        self._handles = [register(self._note) for register in _REGISTRATIONS]
        self._registered = _RegisteredHooks(job, is_new_loop)

    def close(self) -> None:
        """Stop noting registrations."""
        for handle in self._handles:
            handle.remove()

    def begin_call(self, *, is_again: bool) -> None:
        """The function of run.retry is about to be called."""
        self._registered.begin_call(is_again=is_again)

    def enter_world(self, world: World, step: int) -> None:
        """See :class:`Hook`."""
        self._is_first = True

    def begin(self, number: int) -> None:
        """See :class:`Hook`. Raises TrainingError if a parameter, buffer or layer was replaced,
        added or removed, or a hook registered."""
        is_first, self._is_first = self._is_first, False
        wrapped = [m for m in self._job.modules.values() if isinstance(m, ElasticDDP)]
        if [one.wrapped for one in self._structures] != wrapped:
            self._structures = [_Structure(module) for module in wrapped]
        for one in self._structures:
            one.check(is_first=is_first)
        self._registered.check(is_first=is_first)

    def _note(self, owner: nn.Module, name: str, registered: object) -> None:
        for one in self._structures:
            one.may_differ |= id(owner) in one.parts


# ----------------------------------------------------------------------------
# Layers, parameters and buffers.


class _Structure:
    """The layers, and the names, parameters and buffers of a module."""

    def __init__(self, wrapped: ElasticDDP) -> None:
        self.wrapped = wrapped
        self.may_differ = True
        self._expected = dict(_entries(wrapped.module))
        # Those of the world's beginning: the script may have changed the module since.
        known = set(map(id, wrapped.all_parameters))
        for name, parameter in wrapped.module.named_parameters():
            if id(parameter) not in known:
                del self._expected[name]
        self._take_layers()

    def _take_layers(self) -> None:
        self._layers = _layers(self.wrapped.module)
        self.parts = frozenset(map(id, self._layers.values()))

    def check(self, *, is_first: bool) -> None:
        """``is_first``: of a world. The function may have created layers without parameters
        again."""
        if not self.may_differ:
            return
        entries = dict(_entries(self.wrapped.module))
        if entries != self._expected:
            raise _refusal(self._expected, entries)
        layers, known = _layers(self.wrapped.module), self._layers
        for name in layers.keys() | known.keys():
            one, other = known.get(name), layers.get(name)
            if one is not other and not (is_first and type(one) is type(other)):
                raise _refusal_of_layer(name, one, other)
        self._take_layers()
        self.may_differ = False


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_modules(remove_duplicate=False))


def _entries(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The names of the module's state, with the parameters, or None for a buffer."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    yield from ((name, id(parameter)) for name, parameter in parameters.items())
    # Without buffers that are not part of the state, such as a cache.
    yield from ((n, None) for n in module.state_dict(keep_vars=True) if n not in parameters)


def _refusal(expected: dict[str, object], entries: dict[str, object]) -> TrainingError:
    names = [n for n in entries if n not in expected] + [n for n in expected if n not in entries]
    if not names:
        name = next(n for n in entries if entries[n] != expected[n])
        owner, _, own = name.rpartition(".")
        return TrainingError(
            f"the wrapped model's parameter {name!r} was replaced by another one: its gradients "
            "would not be averaged over the ranks, and neither would a recovery restore it",
            hint=f"change it in place: with torch.no_grad(): {owner or 'self'}.{own}.copy_(value); "
            f"what has no gradient is a buffer: self.register_buffer({own!r}, value)",
        )
    name = names[0]
    what = "got the new entry" if name in entries else "lost the entry"
    return TrainingError(
        f"the wrapped model {what} {name!r} after training began: new parameters would not be "
        "averaged over the ranks, and a joining node would create the model without the change and "
        "could not receive its state",
        hint=_HINT,
    )


_HINT = (
    "create all layers, masks and buffers before model = run.wrap(model): for layers that are used "
    "later, layer.requires_grad_(False) until then; for pruning, prune.identity(layer, 'weight'), "
    "and then layer.weight_mask.copy_(mask) in training"
)


def _refusal_of_layer(name: str, one: nn.Module | None, other: nn.Module | None) -> TrainingError:
    before = f"the {type(one).__name__}" if one is not None else "nothing"
    now = type(other).__name__ if other is not None else "gone"
    return TrainingError(
        f"the wrapped model's layer {name!r} is {now} instead of {before} before training began: a "
        "joining node would create the model without the change, and train another one",
        hint="create both layers before model = run.wrap(model), and let forward() choose by a "
        "flag: flags and numbers in attributes of modules are part of the job's state",
    )


# ----------------------------------------------------------------------------
# Hooks.

_Tables = list[dict[int, Callable[..., object]]]
_Place = tuple[str, CodeType]
"""The module, parameter or optimizer, and the function that is called."""


class _RegisteredHooks:
    """The script's hooks on the job's modules, their parameters, and optimizers."""

    def __init__(self, job: JobState, is_new_loop: Callable[[], bool]) -> None:
        self._job = job
        self._is_new_loop = is_new_loop
        self._known: dict[_Place, int] | None = None  # how many there are
        self._checked = -1  # as torch's count of hooks
        self._first_call = self._call = 0  # likewise, as the function was called
        self._steps = self._due = 0
        self._gap = 1

    def begin_call(self, *, is_again: bool) -> None:
        self._call = RemovableHandle.next_id
        if not is_again:  # as each process does, also one that joins later
            self._first_call, self._known = self._call, None

    def check(self, *, is_first: bool) -> None:
        self._steps += 1
        is_due = is_first or self._steps >= self._due
        has_new = is_due and RemovableHandle.next_id != self._checked
        if self._known is not None and not has_new:
            return
        found = self._found()
        if is_first:
            for hooks in found.values():
                self._remove_repeated(hooks)
        numbers = {place: len(hooks) for place, hooks in found.items()}
        if self._known is not None and not self._is_new_loop():
            for place, number in numbers.items():
                if number > self._known.get(place, 0):
                    raise _refusal_of_hook(place)
        self._known = numbers
        self._checked, self._due = RemovableHandle.next_id, self._steps + self._gap
        self._gap = min(2 * self._gap, _MOST_STEPS)

    def _remove_repeated(self, hooks: dict[int, _Tables]) -> None:
        """Of earlier calls of the function, if this one has registered the hook again."""
        if max(hooks) < self._call:
            return
        for number in [n for n in hooks if self._first_call <= n < self._call]:
            for table in hooks.pop(number):
                table.pop(number, None)

    def _found(self) -> dict[_Place, dict[int, _Tables]]:
        found: dict[_Place, dict[int, _Tables]] = defaultdict(dict)
        for name, owner in self._owners():
            tables = torch_private.hooks_of(owner)
            for table in tables:
                for number, hook in table.items():
                    code = _code_of(hook)
                    if code is not None:
                        found[name, code][number] = tables
        return found

    def _owners(self) -> Iterator[tuple[str, object]]:
        for name, module in self._job.named_modules().items():
            for path, part in module.named_modules():
                yield f"{name}.{path}", part
            for path, parameter in module.named_parameters():
                yield f"{name}.{path}", parameter
        for name, tracked in self._job.all_tracked.items():
            if isinstance(tracked, torch.optim.Optimizer):
                yield name, tracked


def _code_of(hook: object) -> CodeType | None:
    """Of a function of the script, or of an instance of its classes."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):
        function = vars(type(hook)).get("__call__")
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) and is_of_script(code) else None


def _refusal_of_hook(place: _Place) -> TrainingError:
    name, code = place
    file = os.path.basename(code.co_filename)
    return TrainingError(
        f"a loop has registered the hook {code.co_name!r} ({file}:{code.co_firstlineno}) on "
        f"{name!r} after its first step: a node that joins, or a job that resumes, would train "
        "without it",
        hint="register it before the loop, and let it read a flag that the loop sets: flags and "
        "numbers in attributes of modules are part of the job's state. To observe something for a "
        "while, remove the hook before the next step: handle.remove()",
    )
