"""Several backward passes over one forward pass of a wrapped module, for losses that share it.

DDP prepares its reducer in the forward pass, for one backward pass. Gradients of a second one would
stay those of each rank, without an error. So the reducer is prepared again before a pass that no
forward pass has announced. Reduced gradients are the same on all ranks: reducing them again, with
those that the pass adds, changes nothing but these.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic import torch_private
from elastic.errors import TrainingError

if TYPE_CHECKING:
    from elastic.training.gradients.wrap import ElasticDDP

_number = itertools.count()
# In the order in which they were wrapped: they may compare bucket plans with other ranks.
_modules: weakref.WeakValueDictionary[int, ElasticDDP] = weakref.WeakValueDictionary()


def watch(module: ElasticDDP) -> None:
    """Watch the backward passes of a module from now on."""
    _install()
    _modules[next(_number)] = module


@functools.cache
def _install() -> None:
    torch_private.watch_backward(_begin)


def _begin(losses: Sequence[Any]) -> Callable[[], None] | None:
    """Prepare for a backward pass. Returns what to call after it."""
    if not any(module.reduction.is_reduced for module in _modules.values()):
        return None
    is_nested = torch_private.current_backward() != torch_private.NO_BACKWARD
    passes = [
        _RepeatedPass(module, losses)
        for module in list(_modules.values())
        if module.reduction.is_reduced and module.in_world and not is_nested
    ]

    def end() -> None:
        for each in passes:
            each.check()

    return end


class _RepeatedPass:
    """A backward pass that may reach a module whose gradients are already reduced."""

    def __init__(self, module: ElasticDDP, losses: Sequence[Any]) -> None:
        self._module = module
        self._before = self._gradients()
        self._reduced = module.reduction.elements
        if not module.reduction.is_static:
            module.prepare_again(lambda: _reach(losses, module.all_parameters), losses)

    def check(self) -> None:
        """Raise TrainingError if the pass has added gradients that are not reduced."""
        reduction = self._module.reduction
        reduced = reduction.elements - self._reduced
        is_complete = reduced == self._module.reduced_elements
        if is_complete or (not reduced and self._gradients() == self._before):
            return
        kind = type(self._module.module).__name__
        reduction.failure = TrainingError(
            f"a second backward pass over one forward pass of {kind} has computed gradients of "
            "only some of its parameters: they are not averaged over the ranks",
            hint="call backward() once, for the sum of the losses, or call the wrapped module for "
            "each; or run.wrap(model, find_unused_parameters=True)",
        )
        raise reduction.failure

    def _gradients(self) -> list[tuple[int, int]]:
        """Identities and versions of the gradients."""
        gradients = [p.grad for p in self._module.all_parameters if p.grad is not None]
        return [(id(g), torch_private.count_of_changes([g])) for g in gradients]


def _reach(losses: Iterable[Any], parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a backward pass from these tensors computes gradients of a parameter."""
    wanted = {id(p) for p in parameters}
    pending = [getattr(loss, "grad_fn", None) or getattr(loss, "node", None) for loss in losses]
    seen = set()
    while pending:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        pending += [function for function, _ in node.next_functions]
    return False
