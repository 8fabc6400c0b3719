"""Watches optimizers step: a step with gradients that are not the job's is an error, not a drift.

One hook on all of torch's optimizers, so that those which nobody told us about are seen, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastic.errors import TrainingError
from elastic.training.step import Step
from elastic.training.wrap import ElasticDDP


class OptimizerGuard:
    """Checks every ``optimizer.step()`` that would change wrapped parameters."""

    def __init__(self, present_step: Callable[[], Step | None]) -> None:
        self._present_step = present_step
        self._modules: list[ElasticDDP] = []
        self._known: dict[int, _Known] = {}  # by id
        self._inside: tuple[torch.optim.Optimizer, int | None] | None = None
        self._is_masking = False
        self._handles: Sequence[Any] = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def watch(self, module: ElasticDDP) -> None:
        """From now on this module's parameters are guarded."""
        self._modules.append(module)
        for known in self._known.values():
            known.count = None

    def allow(self, name: str, tracked: object) -> None:
        """This object was tracked. Wrappers show the real optimizer as ``.optimizer``."""
        for candidate in (tracked, getattr(tracked, "optimizer", None)):
            if isinstance(candidate, torch.optim.LBFGS):
                raise TrainingError(
                    f"run.track({name}=…): LBFGS changes its state before it knows the gradients, "
                    "a step of it cannot be done again",
                    hint="use another optimizer",
                )
            if isinstance(candidate, torch.optim.Optimizer):
                known = self._of(candidate)
                known.name = known.name or name

    @property
    def is_torn(self) -> bool:
        """Whether an update was begun and not ended: the weights belong to no step."""
        if self._inside is None:
            return False
        optimizer, version = self._inside
        return version is None or version != _version(optimizer)

    def reset(self) -> None:
        """A new attempt: what was interrupted is forgotten."""
        self._inside = None

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    # Both run in every step: whatever they call is called with cold caches.

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        known, step = self._of(optimizer), self._present_step()
        name = known.name
        self._is_masking = step is not None and name is not None and step.is_masked(name)
        if self._is_masking:
            optimizer.zero_grad(set_to_none=True)  # without gradients nothing is updated
            return
        for module in self._touched(known, optimizer):
            if _has_gradient(module):
                _check(optimizer, name, step, module)
        if name is not None:
            # A closure runs inside: if it fails, the weights may still be untouched.
            self._inside = optimizer, _version(optimizer) if args[1:] or kwargs else None

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        name = self._of(optimizer).name
        if name is not None and not self._is_masking:
            self._inside = None
            step = self._present_step()
            if step is not None:
                step.stepped.append(name)
        self._is_masking = False

    def _of(self, optimizer: torch.optim.Optimizer) -> _Known:
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = _Known(optimizer)
        return known

    def _touched(self, known: _Known, optimizer: torch.optim.Optimizer) -> list[ElasticDDP]:
        count = 0
        for group in optimizer.param_groups:
            count += len(group["params"])
        if known.count != count:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            known.touched = [m for m in self._modules if ids & set(map(id, m.trained_parameters()))]
            known.count = count
        return known.touched


class _Known:
    """What is known of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name: str | None = None  # if it is tracked
        self.count: int | None = None  # of its parameters when it was looked through
        self.touched: list[ElasticDDP] = []  # modules with some of them


def _check(
    optimizer: torch.optim.Optimizer, name: str | None, step: Step | None, module: ElasticDDP
) -> None:
    """Raise unless the module's gradients are the job's in this step."""
    kind = type(optimizer).__name__
    if name is None:
        raise TrainingError(
            f"{kind} is about to change wrapped parameters, but is not tracked",
            hint="run.track(optimizer=optimizer), or a restart would lose its state",
        )
    if not module.in_world:
        return  # before the first world: rank 0's result is given to all
    if step is None:
        raise TrainingError(
            f"{kind}.step() outside of a step of the loop",
            hint="step inside `for … in loader`, where loader = run.loader(…)",
        )
    if not step.is_last_micro_batch:
        raise TrainingError(
            f"{kind}.step() at step {step.number} before the last of its {len(step)} micro-batches",
            hint="step once per step: after the loop over micro-batches, "
            "or `if step.is_last_micro_batch`",
        )
    reduction = module.reduction
    if reduction.failure is not None:
        raise reduction.failure  # the script has swallowed it
    reduction.wait()
    if not reduction.is_done:
        raise TrainingError(
            f"{kind}.step() at step {step.number} with gradients that were not reduced over "
            "the world",
            hint="call the wrapped module, in train mode, in the forward pass of each backward",
        )
    if len(step) > 1 and not step.is_weighted:
        raise TrainingError(
            f"{kind}.step() at step {step.number} with unweighted gradients of "
            f"{len(step)} micro-batches",
            hint="use step.backward(loss), or (loss * step.weight).backward()",
        )


def _has_gradient(module: ElasticDDP) -> bool:
    return any(parameter.grad is not None for parameter in module.all_parameters)


def _version(optimizer: torch.optim.Optimizer) -> int:
    """Grows with every change of the optimizer's parameters."""
    return sum(p._version for group in optimizer.param_groups for p in group["params"])
