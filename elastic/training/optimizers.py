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
        self._tracked: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = (
            weakref.WeakKeyDictionary()
        )
        self._inside: tuple[torch.optim.Optimizer, int | None] | None = None
        self._is_masking = False
        self._touches: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[int, list[ElasticDDP]]
        ] = weakref.WeakKeyDictionary()
        self._handles: Sequence[Any] = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def watch(self, module: ElasticDDP) -> None:
        """From now on this module's parameters are guarded."""
        self._modules.append(module)
        self._touches.clear()

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
                self._tracked.setdefault(candidate, name)

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

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        name, step = self._tracked.get(optimizer), self._present_step()
        self._is_masking = bool(step is not None and name is not None and step.is_masked(name))
        if self._is_masking:
            optimizer.zero_grad(set_to_none=True)  # without gradients nothing is updated
            return
        self._check(optimizer, name, step)
        if name is not None:
            # A closure runs inside: if it fails, the weights may still be untouched.
            self._inside = optimizer, _version(optimizer) if args[1:] or kwargs else None

    def _check(self, optimizer: torch.optim.Optimizer, name: str | None, step: Step | None) -> None:
        modules = [m for m in self._touched(optimizer) if _has_gradient(m)]
        if not modules:
            return
        kind = type(optimizer).__name__
        if name is None:
            raise TrainingError(
                f"{kind} is about to change wrapped parameters, but is not tracked",
                hint="run.track(optimizer=optimizer), or a restart would lose its state",
            )
        if not all(m.in_world for m in modules):
            return  # before the first world: rank 0's result is given to all
        if step is None:
            raise TrainingError(
                f"{kind}.step() outside of a step of the loop",
                hint="step inside `for … in loader`, where loader = run.loader(…)",
            )
        _check_reduced(kind, step, modules)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step, name = self._present_step(), self._tracked.get(optimizer)
        if name is not None and not self._is_masking:
            self._inside = None
            if step is not None:
                step.stepped.append(name)
        self._is_masking = False

    def _touched(self, optimizer: torch.optim.Optimizer) -> list[ElasticDDP]:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._touches.get(optimizer)
        if known is None or known[0] != count:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            touched = [m for m in self._modules if ids & set(map(id, m.trained_parameters()))]
            known = self._touches[optimizer] = (count, touched)
        return known[1]


def _check_reduced(name: str, step: Step, modules: Sequence[ElasticDDP]) -> None:
    at = f"{name}.step() at step {step.number}"
    if not step.is_last_micro_batch:
        raise TrainingError(
            f"{at} before the last of its {len(step)} micro-batches",
            hint="step once per step: after the loop over micro-batches, "
            "or `if step.is_last_micro_batch`",
        )
    for module in modules:
        if module.reduction.failure is not None:
            raise module.reduction.failure  # the script has swallowed it
        module.reduction.wait()
    if not all(m.reduction.is_done for m in modules):
        raise TrainingError(
            f"{at} with gradients that were not reduced over the world",
            hint="call the wrapped module, in train mode, for the forward pass of each backward",
        )
    if len(step) > 1 and not step.is_weighted:
        raise TrainingError(
            f"{at} with unweighted gradients of {len(step)} micro-batches",
            hint="use step.backward(loss), or (loss * step.weight).backward()",
        )


def _has_gradient(module: ElasticDDP) -> bool:
    return any(p.grad is not None for p in module.all_parameters)


def _version(optimizer: torch.optim.Optimizer) -> int:
    """Grows with every change of the optimizer's parameters."""
    return sum(p._version for group in optimizer.param_groups for p in group["params"])
