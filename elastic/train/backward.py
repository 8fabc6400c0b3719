"""The backward passes of a step, and the phase between forward and backward."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from checkpoints.tensors import is_dtensor
from elastic import torch_private
from elastic.hangs.page import COMPUTE, SCRIPT, Phase, phases
from elastic.torch_private import not_compiled
from elastic.train.reduction import Reduction

# ----------------------------------------------------------------------------
# The script's backward passes: several over one forward pass, and those within others.
#
# Losses may share a forward pass of a wrapped module. DDP prepares its reducer in the forward
# pass, for one backward pass. Gradients of a second one would stay those of each rank, without an
# error. So the reducer is prepared again before a pass that no forward pass has announced. Reduced
# gradients are the same on all ranks: reducing them again, with those that the pass adds, changes
# nothing but these.
#
# Reentrant checkpoints run a pass of their own in the middle of another one.


class Reduced(Protocol):
    """A module whose gradients DDP reduces: :class:`elastic.train.ddp.ElasticDDP`."""

    module: nn.Module
    reduction: Reduction
    in_world: bool
    earlier: EarlierGradients
    reduced_elements: int  # in a pass that is reduced

    @property
    def all_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters."""

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether a pass may leave out some of them."""

    def prepare_again(self, losses: Sequence[torch.Tensor]) -> None:
        """Prepare for another pass, with these losses."""


_number = itertools.count()
# In the order in which they were wrapped: they may compare bucket plans with other ranks.
_modules: weakref.WeakValueDictionary[int, Reduced] = weakref.WeakValueDictionary()


_is_expected = False
_nested: list[Sequence[Any]] = []  # losses of passes within another one
_waiting: dict[Callable[[], None], None] = {}  # in order


@functools.cache
def watch() -> None:
    """Watch the backward passes of this process from now on."""
    torch_private.watch_backward(_begin)


def watch_module(module: Reduced) -> None:
    """Reduce the gradients of a module in every backward pass."""
    watch()
    _modules[next(_number)] = module


def expect() -> None:
    """Backward passes from now on are those of training: a hang in one is found early."""
    global _is_expected
    _is_expected = True


def are_nested() -> bool:
    """Whether a backward pass runs in the middle of another one."""
    return bool(_nested)


def call_after_all(callback: Callable[[], None]) -> None:
    """Call back once, after the outermost backward pass."""
    _waiting[callback] = None


def cancel(callback: Callable[[], None]) -> None:
    """Do not call back after the outermost backward pass."""
    _waiting.pop(callback, None)


def _begin(losses: Sequence[Any]) -> Callable[[bool], None]:
    """Prepare for a backward pass. Returns what to call at its end, with whether it succeeded."""
    if torch_private.current_backward() != torch_private.NO_BACKWARD:
        _nested.append(losses)
        return _end_nested
    _nested.clear()
    _waiting.clear()
    if _is_expected:
        phases.enter(COMPUTE)
    for earlier in list(_earlier):
        earlier.look(losses)
    for module in list(_modules.values()):
        if module.earlier.are_added_to:
            module.reduction.refuse_earlier_partial()
    repeated = [
        _RepeatedPass(module, losses)
        for module in list(_modules.values())
        if module.in_world and module.reduction.is_reduced
    ]
    return functools.partial(_end, repeated)


def _end_nested(has_succeeded: bool) -> None:
    del _nested[-1:]


def _end(repeated: Sequence[_RepeatedPass], has_succeeded: bool) -> None:
    try:
        if has_succeeded:
            _finish(repeated)
    finally:
        if _is_expected:
            phases.enter(SCRIPT)


def _finish(repeated: Sequence[_RepeatedPass]) -> None:
    for callback in list(_waiting):
        callback()
    _waiting.clear()
    for each in repeated:
        each.check()


_REENTRANT = "CheckpointFunctionBackward"  # torch/utils/checkpoint.py


class _RepeatedPass:
    """A backward pass that may reach a module whose gradients are already reduced.

    One that reaches only some of its parameters, as that of an actor through ``critic.Q1``, is not
    reduced: buckets would wait for the others. Its gradients are usually cleared before they are
    used. If they are not, the next pass over all parameters reduces the sum; an update before that
    is refused.
    """

    def __init__(self, module: Reduced, losses: Sequence[Any]) -> None:
        self._module = module
        self._before = self._gradients()
        self._reduced = module.reduction.elements
        if module.reduction.is_static:
            return
        trained = [p for p in module.all_parameters if p.requires_grad]
        reached = _reached(losses, trained)
        is_whole = reached == len(trained) or module.finds_unused_parameters
        if reached and is_whole:
            module.prepare_again(losses)

    def check(self) -> None:
        """Note whether the pass has added gradients that are not reduced."""
        reduction = self._module.reduction
        reduced = reduction.elements - self._reduced
        is_complete = reduced == self._module.reduced_elements
        if is_complete or (not reduced and self._gradients() == self._before):
            return
        reduction.adds_partially(type(self._module.module).__name__)

    def _gradients(self) -> list[tuple[int, int]]:
        """Identities and versions of the gradients."""
        gradients = [p.grad for p in self._module.all_parameters if p.grad is not None]
        return [(id(g), torch_private.count_of_changes([g])) for g in gradients]


def _reached(
    losses: Iterable[Any], parameters: Sequence[torch.Tensor], most: int | None = None
) -> int:
    """Of how many of these parameters, at most, a backward pass from ``losses`` computes gradients.

    Reentrant checkpoints hide parameters: one may reach all of them.
    """
    wanted = {id(p) for p in parameters}
    most = len(wanted) if most is None else most
    pending = [getattr(loss, "grad_fn", None) or getattr(loss, "node", None) for loss in losses]
    seen = set()
    count = 0
    while pending and count < most:
        node: Any = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == _REENTRANT:
            return most
        count += id(getattr(node, "variable", None)) in wanted
        pending += [function for function, _ in node.next_functions]
    return count


# ----------------------------------------------------------------------------
# Gradients of committed steps to which a later one adds: they are a part of the state.

_FIRST_LOOKS = 3  # at gradients on a device, which wait for it; then at each power of two


class EarlierGradients:
    """Notes whether the first backward pass of a step adds to gradients of committed steps, or a
    hook may read them before it.

    ``parameters``: those of a module that have gradients; ``computed_for``: more tensors for which
    passes compute these, as for the parameters that FSDP has gathered.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        computed_for: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self._parameters, self._computed_for = parameters, computed_for
        self._is_expected = False  # no pass has computed gradients since the last commit
        self._looks = 0
        self.are_added_to = False  # in this step, or this accumulation
        _earlier.add(self)

    def begin_step(self) -> None:
        """A step begins, or the first one of an accumulation."""
        watch()
        self._is_expected, self.are_added_to = True, False

    def forget(self) -> None:
        """The step is undone."""
        self._is_expected = self.are_added_to = False

    def look(self, losses: Sequence[Any]) -> None:
        """A backward pass from ``losses`` begins.

        Scripts that set gradients to None, as is usual, need only the first line.
        """
        if not self._is_expected:
            return
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if gradients:
            if not _reached(losses, [*self._parameters(), *self._computed_for()], most=1):
                return  # as of a generator, in the pass of its critic
            self._note(gradients)
        self._is_expected = False

    def are_read(self) -> None:
        """A hook of an optimizer runs before the optimizer's closure. It may read the gradients of
        committed steps, unless this step has computed some."""
        if self._is_expected and (
            gradients := [p.grad for p in self._parameters() if p.grad is not None]
        ):
            self._note(gradients)

    def _note(self, gradients: Sequence[torch.Tensor]) -> None:
        self._looks += 1
        looks, is_on_host = self._looks, gradients[0].device.type == "cpu"
        if any(map(is_dtensor, gradients)):
            self.are_added_to = True  # zeros, too: a rank's shards may be empty, but not all
        elif is_on_host or looks <= _FIRST_LOOKS or looks & (looks - 1) == 0:
            self.are_added_to |= any(bool(gradient.any()) for gradient in gradients)


_earlier: weakref.WeakSet[EarlierGradients] = weakref.WeakSet()


def before_closure(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer`` is about to call its hooks, and then a closure that computes gradients."""
    if torch_private.has_step_pre_hooks(optimizer):
        for earlier in list(_earlier):
            earlier.are_read()


# ----------------------------------------------------------------------------
# The phase of a rank in forward and backward passes: computing, until they end.
#
# Between them the script may do anything: draw a plot on rank 0, write samples. That is its own
# code, which has a longer budget (:mod:`elastic.hangs.page`).

_before: list[Phase] = []  # before the forward passes that have begun; modules may be nested


def begin_forward(*, is_training: bool) -> None:
    """A forward pass begins."""
    if not is_training:
        phases.enter(Phase.EVALUATION)
        return
    watch()
    expect()
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


# ----------------------------------------------------------------------------
# Which parameters are trained: part of the job's state.


def frozen_indices(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Which parameters are not trained, in order."""
    return [i for i, p in enumerate(parameters) if not p.requires_grad]


def set_frozen(parameters: Iterable[nn.Parameter], indices: Collection[int]) -> None:
    """Train all parameters except these."""
    for index, parameter in enumerate(parameters):
        if parameter.requires_grad is (index in indices):
            parameter.requires_grad_(index not in indices)
