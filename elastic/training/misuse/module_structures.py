"""Refuses a wrapped module whose parameters or buffers are replaced, added or removed in training.

A layer that grows a model, ``self.weight = nn.Parameter(…)`` in a forward pass (an EMA codebook in
many VQ-VAEs), pruning that starts in the middle: DDP reduces the parameters that it has seen, so
ranks would train different models, and no error would occur. A joining process would create the
module as it was, and could not load the state of the others.

torch reports each registration, so a step costs one comparison. A buffer may get another tensor: it
keeps its name, and nothing reduces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from elastic.errors import TrainingError
from elastic.training.gradients.wrap import ElasticDDP, Wrapped

_HOOKS = (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class ModuleStructures:
    """Compares the job's wrapped modules with what they were in their first step. One per
    process."""

    def __init__(self) -> None:
        self._structures: list[_Structure] = []  # in the order of the job's modules
        self._handles = [register(self._note) for register in _HOOKS]

    def close(self) -> None:
        """Stop noting registrations."""
        for handle in self._handles:
            handle.remove()

    def step_begins(self, modules: Iterable[Wrapped]) -> None:
        """Raise TrainingError if a parameter or buffer was replaced, added or removed."""
        wrapped = [module for module in modules if isinstance(module, ElasticDDP)]
        if [one.wrapped for one in self._structures] != wrapped:
            self._structures = [_Structure(module) for module in wrapped]
        for one in self._structures:
            one.check()

    def _note(self, owner: nn.Module, name: str, registered: object) -> None:
        for one in self._structures:
            one.may_differ |= id(owner) in one.parts


class _Structure:
    """The names, parameters and buffers of a module."""

    def __init__(self, wrapped: ElasticDDP) -> None:
        self.wrapped = wrapped
        self.parts = frozenset(map(id, wrapped.module.modules()))
        self.may_differ = True
        self._expected = dict(_entries(wrapped.module))
        # Those of the world's beginning: the script may have changed the module since.
        known = set(map(id, wrapped.all_parameters))
        for name, parameter in wrapped.module.named_parameters():
            if id(parameter) not in known:
                del self._expected[name]

    def check(self) -> None:
        if not self.may_differ:
            return
        found = dict(_entries(self.wrapped.module))
        if found != self._expected:
            raise _refusal(self._expected, found)
        self.may_differ = False


def _entries(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The names of the module's state, with the parameters, or None for a buffer."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    yield from ((name, id(parameter)) for name, parameter in parameters.items())
    # Without buffers that are not part of the state, such as a cache.
    yield from ((n, None) for n in module.state_dict(keep_vars=True) if n not in parameters)


def _refusal(expected: dict[str, object], found: dict[str, object]) -> TrainingError:
    names = [n for n in found if n not in expected] + [n for n in expected if n not in found]
    if not names:
        name = next(n for n in found if found[n] != expected[n])
        owner, _, own = name.rpartition(".")
        return TrainingError(
            f"the wrapped model's parameter {name!r} was replaced by another one: its gradients "
            "would not be averaged over the ranks, and neither would a recovery restore it",
            hint=f"change it in place: with torch.no_grad(): {owner or 'self'}.{own}.copy_(value); "
            f"what has no gradient is a buffer: self.register_buffer({own!r}, value)",
        )
    name = names[0]
    what = "got the new entry" if name in found else "lost the entry"
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
