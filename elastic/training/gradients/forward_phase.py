"""The phase of a rank in forward and backward passes: computing, until they end.

Between them the script may do anything: draw a plot on rank 0, write samples. That is its own code,
which has a longer budget (:mod:`elastic.hangs.budgets`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic.compiling import not_compiled
from elastic.hangs.facts import COMPUTE, Phase
from elastic.hangs.phases import phases
from elastic.training.gradients import backward_passes

_before: list[Phase] = []  # before the forward passes that have begun; modules may be nested


def begin_forward(*, is_training: bool) -> None:
    """A forward pass begins."""
    if not is_training:
        phases.enter(Phase.EVALUATION)
        return
    backward_passes.watch()
    backward_passes.expect()
    _before.append(phases.enter(COMPUTE))


def end_forward() -> None:
    """The last forward pass that has begun in training ends."""
    if _before:
        phases.enter(_before.pop())


class ForwardHooks:
    """Report the forward passes of a module; a copy of the module reports nothing.

    ``begin``: called before each in training.
    """

    def __init__(self, module: nn.Module, begin: Callable[[], object] = lambda: None) -> None:
        module.register_forward_pre_hook(_Hook(begin))
        module.register_forward_hook(_Hook(end_forward, is_after=True), always_call=True)


class _Hook:
    def __init__(self, act: Callable[[], object] | None = None, *, is_after: bool = False) -> None:
        self._act, self._is_after = act, is_after

    @not_compiled
    def __call__(self, module: nn.Module, *_: Any) -> None:
        is_training = module.training and torch.is_grad_enabled()
        if self._act is None or (self._is_after and not is_training):
            return
        if not self._is_after:
            begin_forward(is_training=is_training)
        if is_training:
            self._act()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        """Copy and pickle as a hook that does nothing."""
        return _Hook, ()
