"""Objects that hold optimizers: wrappers of one (SAM), and containers of several, as trainers have
for the parts of a model, or for two kinds of optimizers.

Updates are recorded for each inner optimizer. So a container is replaced by its optimizers, if it
has no other state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

_OF_TORCH = frozenset({"defaults", "state", "param_groups"})  # those of the class Optimizer


def inner_optimizers(tracked: object) -> dict[str, Optimizer]:
    """Inner optimizers (SAM's ``base_optimizer``) by name, if the outer state excludes their
    state."""
    if not isinstance(tracked, Optimizer):
        return {}
    if type(tracked).state_dict is not Optimizer.state_dict:
        return {}  # it includes them
    return {name: inner for name, inner in vars(tracked).items() if isinstance(inner, Optimizer)}


def optimizers_instead_of(container: object) -> list[Optimizer]:
    """The optimizers in the lists, tuples and dicts of a container that only passes ``step()`` on
    to them; empty if the object may have other state: a number, a tensor, a list of something else.
    """
    attributes = getattr(container, "__dict__", {})
    if isinstance(container, type) or not callable(getattr(container, "step", None)):
        return []
    if isinstance(container, Optimizer):
        if not only_passes_on(container):
            return []
        attributes = {n: v for n, v in attributes.items() if n not in _OF_TORCH and n[0] != "_"}
    if not all(map(_has_no_other_state, attributes.values())):
        return []
    return _contained(container)


def only_passes_on(container: Optimizer) -> bool:
    """Whether all parameters of an optimizer are those of optimizers that it contains: its
    ``step()`` calls theirs."""
    inner = {id(p) for one in _contained(container) for p in _parameters(one)}
    return bool(inner) and all(id(p) in inner for p in _parameters(container))


def holder_of(optimizer: Optimizer, tracked: Mapping[str, object]) -> tuple[str, str] | None:
    """The name of the tracked object that contains ``optimizer`` in a list, tuple or dict, and the
    expression for all of its optimizers."""
    for name, holder in tracked.items():
        for attribute, held in getattr(holder, "__dict__", {}).items():
            if any(one is optimizer for one in _optimizers_in(held)):
                values = ".values()" if isinstance(held, Mapping) else ""
                return name, f"{name}.{attribute}{values}"
    return None


def _contained(container: object) -> list[Optimizer]:
    found = {id(o): o for held in vars(container).values() for o in _optimizers_in(held)}
    return list(found.values())


def _optimizers_in(held: object) -> list[Optimizer]:
    return [one for one in _items(held) if isinstance(one, Optimizer)]


def _items(held: object) -> list[object]:
    if isinstance(held, Mapping):
        return list(held.values())
    return list(held) if isinstance(held, (list, tuple)) else []


def _has_no_other_state(value: object) -> bool:
    stateless = (str, bool, nn.Module, Optimizer)
    if value is None or callable(value) or isinstance(value, stateless):
        return True
    is_collection = isinstance(value, (Mapping, list, tuple))
    return is_collection and all(isinstance(one, stateless) for one in _items(value))


def _parameters(optimizer: Optimizer) -> Iterable[object]:
    return (p for group in optimizer.param_groups for p in group["params"])
