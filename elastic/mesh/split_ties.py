"""Tied weights that ``parallelize_module`` and ``distribute_module`` split.

They replace each parameter of each module by a DTensor. If two modules share a parameter (an
embedding and the head), each gets a DTensor of its own: they begin with the same values, and the
optimizer updates each with its own gradient. torch does not report that; it reports each
registration of a parameter, before the module has the new one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from elastic.errors import ConfigError


class SplitTies:
    """Notes which parameters are replaced by DTensors, from now on."""

    def __init__(self) -> None:
        self._replaced = _Replaced()
        note = functools.partial(_note, self._replaced)
        weakref.finalize(self, register_module_parameter_registration_hook(note).remove)

    def check(self, module: nn.Module) -> None:
        """Raise ConfigError if parameters of ``module`` were one tied weight, and no longer are."""
        for first, second in self._replaced.pairs(module):
            raise ConfigError(
                f"run.wrap() of a module with DTensors: {first!r} and {second!r} were one tied "
                "weight, of which parallelize_module or distribute_module made two parameters",
                hint=f"tie them again after it: model.{second} = model.{first}. An nn.Embedding "
                "with RowwiseParallel and an nn.Linear with ColwiseParallel are both sharded over "
                "the vocabulary",
            )


@dataclass(frozen=True)
class _Place:
    """Where a parameter was replaced."""

    owner: weakref.ref[nn.Module]
    name: str


@dataclass(frozen=True)
class _Weight:
    """A parameter that was replaced, and where."""

    before: weakref.ref[nn.Parameter]
    places: list[_Place] = field(default_factory=list)


@dataclass
class _Replaced:
    """The parameters that were replaced."""

    _weights: list[_Weight] = field(default_factory=list)
    # By the id of a parameter, which another one may get after it was freed.
    _known: dict[int, _Weight] = field(default_factory=dict)

    def note(self, parameter: nn.Parameter, place: _Place) -> None:
        known = self._known.get(id(parameter))
        if known is None or known.before() is not parameter:
            known = self._known[id(parameter)] = _Weight(weakref.ref(parameter))
            self._weights.append(known)
        known.places.append(place)

    def pairs(self, module: nn.Module) -> Iterator[tuple[str, str]]:
        """The names in ``module`` of parameters that were one, and are two."""
        prefixes = {id(each): f"{name}." if name else "" for name, each in module.named_modules()}
        kept = {id(each): name for name, each in module.named_parameters()}
        for weight in self._weights:
            names: dict[int, str] = {}  # by parameter
            before = weight.before()
            if before is not None and id(before) in kept:  # by a module outside of the plan
                names[id(before)] = kept[id(before)]
            for place in weight.places:
                owner = place.owner()
                if owner is not None and id(owner) in prefixes:
                    now = getattr(owner, place.name, None)
                    names.setdefault(id(now), prefixes[id(owner)] + place.name)
            if len(names) > 1:
                first, second, *_ = names.values()
                yield first, second


def _note(replaced: _Replaced, owner: nn.Module, name: str, new: object) -> None:
    if not _is_dtensor(new):
        return
    old = getattr(owner, name, None)
    if isinstance(old, nn.Parameter) and not _is_dtensor(old):
        replaced.note(old, _Place(weakref.ref(owner), name))


def _is_dtensor(value: object) -> bool:
    return hasattr(value, "placements")  # without importing DTensor, which takes time
