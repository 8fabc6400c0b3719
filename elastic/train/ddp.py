"""A DistributedDataParallel that stays the same object through all worlds.

Before the first world, in eval mode and without gradients it is a plain module without
collectives: rank 0 may evaluate alone. (Stock DDP broadcasts buffers in eval mode, too, and such
a script hangs.) For each world it is initialised again in place: references held by the optimizer,
``torch.compile`` and the user's variables remain valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import is_lazy

from elastic import torch_private
from elastic.errors import ConfigError, TrainingError
from elastic.groups.collectives import ReleasableGroup, broadcast_tensors, complete, world_group
from elastic.groups.pending import remove_reducer_hooks, semantics_of
from elastic.torch_private import not_compiled, not_compiled_itself
from elastic.train import backward
from elastic.train.backward import EarlierGradients, begin_forward, end_forward
from elastic.train.order import (
    COUNT,
    ReductionOrder,
    Sent,
    Unit,
    is_any_absent,
    others_without,
    write_present,
)
from elastic.train.reduction import Filler, Reduction, weighted_sum
from elastic.train.sharded import ShardedModule
from elastic.train.sharding import HeldParts

Wrapped: TypeAlias = "ElasticDDP | ShardedModule"
"""A module of the job: DDP or sharded."""

_NAMED = 4  # parameters in an error
_BYPASS = "gradients would bypass the weights of uneven shares"
_REFUSED = {
    "process_group": "the world's group is the only one that is rebuilt",
    "device_mesh": "the world's group is the only one that is rebuilt",
    "delay_all_reduce_named_params": _BYPASS,
    "param_to_hook_all_reduce": _BYPASS,
    "mixed_precision": f"it has a communication hook, and {_BYPASS}",
}


class ElasticDDP(DDP):
    """The module that ``run.wrap`` returns. ``options`` are DistributedDataParallel's."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        for name in options:
            if name in _REFUSED:
                raise ConfigError(f"wrap({name}=…) is not possible: {_REFUSED[name]}")
        _check_kind(module)
        nn.Module.__init__(self)
        self.module = module
        self.options = options
        self.reduction = Reduction()
        self.earlier = EarlierGradients(lambda: self.all_parameters)
        self.in_world = False
        self.reduced_elements = 0  # in a backward pass that is reduced
        self._trained: tuple[bool, ...] = ()  # the parameters the reducer was created for
        self._releasable: ReleasableGroup | None = None  # the reducer holds no reference
        self.require_backward_grad_sync = True
        self.training = module.training
        self._in_world_parameters: tuple[nn.Parameter, ...] = ()
        self._buffers_unit: Unit | None = None  # in the order of reductions
        self._filler = Filler()

    def match(self, order: ReductionOrder, name: str) -> None:
        """Compare the order of reductions with other ranks; this module is called ``name``."""

        def is_trained() -> bool:
            return self.in_world and any(p.requires_grad for p in self._in_world_parameters)

        label = f"the gradients of {name} ({type(self.module).__name__})"
        self.reduction.match(order, Unit(name, label, is_trained, self._accumulates))
        self._buffers_unit = order.add(
            Unit(name, label.replace("gradients", "buffers", 1), _never, _never)
        )

    def _accumulates(self) -> bool:
        return self.reduction.is_local

    def enter_world(self) -> None:
        """Become a working DDP over the current default group. Parameters must already agree.

        Without trainable parameters it stays a plain module until there are some.
        """
        self.leave_world()
        self._in_world_parameters = tuple(self.module.parameters())
        self._trained = tuple(map(_is_trained, self._in_world_parameters))
        self.in_world = True
        if any(self._trained):
            self._become_ddp()

    def _become_ddp(self) -> None:
        kept = torch_private.hook_tables(self)
        training, module = self.training, self.module
        # Restore has already agreed on the state: init_sync would broadcast all of it again.
        DDP.__init__(self, module, **{"init_sync": False, **self.options})
        self.__dict__.update(kept)
        self.training = training
        self.reduced_elements = sum(p.numel() for p in self.all_parameters if p.requires_grad)
        backward.watch_module(self)
        reduction, group = self.reduction, self.process_group
        is_on_stream = semantics_of(self.device_type).is_on_stream
        if self.device_type == "cpu" and not is_on_stream:
            reduction.enter(group, is_divided=True)
            self._releasable = ReleasableGroup(
                group, reduction.all_reduce, is_on_stream=False, before_plan=reduction.before_plan
            )
            self._releasable.replace(self.reducer)
        else:  # nothing waits on the host, and an abort releases the stream
            reduction.enter(group, is_divided=False)
            super().register_comm_hook(reduction, weighted_sum)
            if is_on_stream:
                self._releasable = ReleasableGroup(
                    group,
                    reduction.queue,
                    is_on_stream=True,
                    before_plan=reduction.before_plan,
                )
                self._releasable.replace(self.reducer)

    @property
    def finds_unused_parameters(self) -> bool:
        """Whether a backward pass may leave out parameters."""
        return bool(self.find_unused_parameters)

    def prepare_again(self, losses: Sequence[torch.Tensor]) -> None:
        """Prepare for another backward pass since the last forward pass. A collective, until a
        forward pass has followed a reduction."""
        torch_private.prepare_again(self.reducer, losses if self.find_unused_parameters else ())

    def leave_world(self) -> None:
        """Become a plain module again and release the group.

        The old reducer's hooks must be removed: otherwise the next DDP over the same parameters
        fails. The reducer itself must also be freed now: it holds the group, and if the garbage
        collector of a forked DataLoader worker frees it, the group's destructor joins a thread that
        the child does not have: SIGSEGV [measured].
        """
        if "reducer" in self.__dict__:
            remove_reducer_hooks(self.reducer)
        for name in ("reducer", "logger", "process_group"):
            self.__dict__.pop(name, None)
        self.reduction.leave()
        self._filler.end()
        self._releasable = None
        self._in_world_parameters = self._trained = ()
        self.in_world = False

    def _set_static_graph(self) -> None:
        """Called by DDP for ``static_graph=True``, and by scripts."""
        super()._set_static_graph()  # type: ignore[no-untyped-call]
        self.reduction.is_static = True

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """In ``join()``, on a rank without data: shadow another pass of its peers."""
        self.reduction.speak_again()
        super()._match_all_reduce_for_bwd_pass()  # type: ignore[no-untyped-call]

    def join_hook(self, **kwargs: Any) -> Any:
        """Called by ``torch.distributed.algorithms.join.Join([model])``. Raises TrainingError
        before the first world, since a new world needs another hook."""
        if not self.in_world:
            raise TrainingError(
                "Join([model]) was entered before there is a world",
                hint="with run.loader all ranks have the same number of steps, so Join is not "
                "needed; otherwise enter it in the function that run.retry calls",
            )
        return super().join_hook(**kwargs)  # type: ignore[no-untyped-call]

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Raise ConfigError: gradients would bypass the weights of uneven shares."""
        raise _refusal("register_comm_hook", hook)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        raise _refusal("_register_builtin_comm_hook", comm_hook_type)

    @property
    def is_plain(self) -> bool:
        """Whether a forward pass would run without collectives."""
        return not (self.in_world and self._is_in_train_mode and torch.is_grad_enabled())

    @property
    def _is_in_train_mode(self) -> bool:
        """Whether the wrapper or the module is: a framework may call ``eval()`` on the wrapper, and
        then restore the mode of the module (Lightning); a script may train in ``module.eval()``."""
        return self.training or self.module.training

    @not_compiled_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass; through DDP only while training in a world."""
        self._begin_forward()
        try:
            return self._forward(*inputs, **kwargs)
        finally:
            self._end_forward()

    @not_compiled_itself
    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self.is_plain and self._is_reduced():
            if self.reduction.failure is not None:
                raise self.reduction.failure  # the script caught it; DDP's pass would not end
            self.reduction.forward_begins()
            if not self.require_backward_grad_sync:
                self.reduction.accumulates()
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if device_ids := self.options.get("device_ids"):
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, device_ids[0])  # type: ignore[no-untyped-call]
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self.module(*inputs, **kwargs)

    @not_compiled
    def _begin_forward(self) -> None:
        """Report a forward pass as progress, in training or evaluation."""
        is_training = self._is_in_train_mode and torch.is_grad_enabled()
        if self.in_world or not is_training:
            begin_forward(is_training=is_training)

    @not_compiled
    def _end_forward(self) -> None:
        if not self.is_plain:
            end_forward()

    @not_compiled
    def _is_reduced(self) -> bool:
        """Whether gradients of a pass that begins now are reduced.

        The reducer handles only parameters that were trainable when it was created. If the script
        has frozen or unfrozen some since, it is recreated, in milliseconds; if all are frozen (a
        discriminator, while the generator trains), it is not used meanwhile.
        """
        trained = tuple(map(_is_trained, self._in_world_parameters))
        if trained == self._trained:
            return True in trained
        if True not in trained:
            return False
        self.enter_world()
        return True

    def begin_step(self, weight: float, *, has_samples: bool = True) -> None:
        """Begin a step in which this rank's gradients have ``weight``, the fraction of its samples
        in the global batch, or those of all ranks are equal. Without samples it reads a filler."""
        self._filler.end()
        if not has_samples and self.reduction.is_local:
            weight = self.reduction.weight  # that of the gradients in .grad
        if not has_samples and weight:
            self._filler.begin(self.all_parameters)
        factor = self.reduction.rescale(weight)
        if factor != 1.0:
            gradients = [p.grad for p in self.all_parameters if p.grad is not None]
            torch_private.multiply_each(gradients, factor)
        self.reduction.begin(weight)

    def end_step(self) -> None:
        """End a step: backward passes outside of steps add their gradients."""
        self._filler.end()

    @property
    def holds_gradients(self) -> bool:
        """False: gradients of passes under ``no_sync()`` are in the parameters' ``.grad``."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        """The state for ``copy.deepcopy`` and ``torch.save``: a wrapped module outside of a
        world."""
        kept = torch_private.hook_tables(self)
        return {
            "module": self.module,
            "options": self.options,
            "training": self.training,
            "kept": kept,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copy as a plain module outside of the job, for target networks and averages."""
        ElasticDDP.__init__(self, state["module"], **state["options"])
        self.__dict__.update(state["kept"])
        self.training = state["training"]

    @not_compiled
    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcast rank 0's buffers before each forward pass. DDP would wait inside gloo, where
        the wait cannot be interrupted (see elastic/groups/pending.py). On the CPU this waits
        here."""
        if semantics_of("cpu").is_on_stream or not all(t.device.type == "cpu" for t in tensors):
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        first = next(iter(by_dtype.values()), None)
        for same in by_dtype.values():
            flat = torch.cat([t.reshape(-1) for t in same])
            self._share(flat, authoritative_rank, is_first=first is same)
            parts = torch.split(flat, [t.numel() for t in same])
            torch_private.copy_each(same, [p.view_as(t) for p, t in zip(parts, same, strict=True)])

    def _share(self, flat: torch.Tensor, source: int, *, is_first: bool) -> None:
        """Broadcast one rank's tensor. If it is the first one, other ranks must do so, too."""
        order, group = self.reduction.order, world_group()
        if order is None or self._buffers_unit is None or not is_first or group.size == 1:
            broadcast_tensors({"buffers": flat}, source)
            return
        if flat.dtype == torch.bool or flat.is_complex():
            order.before(self._buffers_unit, None)
            broadcast_tensors({"buffers": flat}, source)
            return
        both = flat.new_zeros(flat.numel() + COUNT)
        values, end = both[:-COUNT], both[-COUNT:]
        if group.rank == source:
            values.copy_(flat)
        write_present(end)
        order.before(self._buffers_unit, Sent.of(both))
        complete(group.all_reduce(both), flat.device, group)
        if is_any_absent(end):
            raise others_without(self._buffers_unit.name, order.step)
        flat.copy_(values)

    @property
    def all_parameters(self) -> tuple[nn.Parameter, ...]:
        """In a world, the parameters at its beginning, as in DDP: walking a large model in every
        step would cost more than a millisecond."""
        return self._in_world_parameters if self.in_world else tuple(self.module.parameters())

    def held_parts(self) -> HeldParts:
        """This rank holds everything: a replica is one rank here."""
        names = [name for name, _ in self.module.named_parameters()]
        return HeldParts(names, (0,) * len(names))

    def gradients_compared(self) -> None:
        """No rank of a replica holds the same part of a parameter as another one."""

    def reshard(self) -> None:
        """The parameters are not sharded."""

    @property
    def local_parameters(self) -> tuple[torch.Tensor, ...]:
        """This rank's part of the parameters: all."""
        return self.all_parameters

    @property
    def counted_parameters(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose changes torch counts."""
        return self.all_parameters


_is_trained = attrgetter("requires_grad")


def _never() -> bool:
    return False


def hint_of_unreduced(module: Wrapped) -> str:
    """What to do about gradients that were not reduced in a step."""
    unused = _unused(module) if isinstance(module, ElasticDDP) else []
    if not unused:
        return module.reduction.hint_of_unreduced
    names = ", ".join(unused[:_NAMED]) + ", …" * (len(unused) > _NAMED)
    return (
        f"these parameters got no gradient: {names}: run.wrap(model, find_unused_parameters=True), "
        "or freeze them with requires_grad_(False)"
    )


def _unused(module: ElasticDDP) -> list[str]:
    """Trained parameters without a gradient, after a backward pass that left out some of them."""
    if not module.reduction.has_forward or module.options.get("find_unused_parameters"):
        return []
    trained = {n: p for n, p in module.module.named_parameters() if p.requires_grad}
    unused = [name for name, p in trained.items() if p.grad is None]
    return unused if len(unused) < len(trained) else []


def _check_kind(module: nn.Module) -> None:
    """Raise ConfigError for a module that DDP does not support."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"run.wrap() of a {type(module).__name__}: its process group would end with the world",
            hint="wrap the module itself: model = run.wrap(Net().to(run.device))",
        )
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"run.wrap() of a module whose parameter {lazy[0]!r} has no shape yet (LazyLinear, …)",
            hint="pass a batch through it first: network(example); model = run.wrap(network)",
        )


def _refusal(call: str, hook: object) -> ConfigError:
    return ConfigError(
        f"model.{call}({getattr(hook, '__name__', hook)}) is not possible: {_BYPASS}",
        hint="train without the hook: the harness reduces gradients itself",
    )
