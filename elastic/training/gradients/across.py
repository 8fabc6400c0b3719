"""Gradients of sharded models, reduced across replicas separately for each position's shards.

FSDP has averaged them over the ranks of the replica that split its samples (reduce-scatter); the
sum over replicas remains. ``FSDPModule.set_all_reduce_hook`` calls :meth:`AcrossReduction.reduce`
with each group of parameters, in Python, in the middle of the backward pass (``foreach_reduce`` in
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). If the world has ended, it does not
raise: FSDP's collectives within the replica continue on all of its ranks. At the end of the
backward pass, a sum over the replica determines whether the gradients are valid. This is the only
collective of a step besides those of the gradients: control flags follow the first bucket across
replicas, as with DDP, and are then added to the sum, as is the replica's question for the next
boundary (``ModelReplica.question``).

Without FSDP, a module's local gradients are summed in buckets at the end of the backward pass: over
the replicas, and first within the replica if each of its ranks holds the entire module.

Shares of the batch may differ by a sample, between replicas and within one. So before the
reduce-scatter, a rank's gradients are multiplied by the ratio of its share to an even share.
"""

# No `from __future__ import annotations`: as in reduction.py.
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from elastic.errors import GroupAborted
from elastic.hangs.facts import SCRIPT
from elastic.hangs.phases import phases
from elastic.mesh import ModelReplica
from elastic.process_group import OwnGroup
from elastic.torch_private import (
    call_after_backward,
    copy_each,
    current_backward,
)
from elastic.training.gradients import backward_passes
from elastic.training.gradients.control_flags import (
    COUNT,
    Room,
    absent,
    in_replica,
    others_without,
    write_present,
)
from elastic.training.gradients.matching.order import Sent, Unit
from elastic.training.gradients.matching.uncertain import (
    UncertainGradients,
    gradient_dtype,
    local_gradient,
    place_like,
)
from elastic.training.gradients.reduction import NEARLY, Reduction
from elastic.training.gradients.sharding import CurrentParameters, sharded_over

_LEFT = "the world has ended for a rank of this replica: this step's gradients are incomplete"


class AcrossReduction(Reduction):
    """Sums the gradients of one module's shards over the replicas of a world."""

    def __init__(self, replica: ModelReplica) -> None:
        super().__init__()
        backward_passes.watch()
        self._replica = replica
        self._across: OwnGroup | None = None  # None outside of a world
        self._fault: Exception | None = None  # of this rank, not yet settled
        self._pass: int | None = None  # the backward pass that ends with a call of _settle
        self._end: torch.Tensor | None = None  # flags of this step, not yet settled
        self._room: Room | None = None  # holds their sum once the collective has ended
        self._ends: list[tuple[Unit, torch.Tensor]] = []  # of other sums, not yet ended
        self._current: CurrentParameters | None = None  # of a module without FSDP
        self._parameters: list[torch.nn.Parameter] = []  # trained ones, when they were last read
        self._hooked: list[torch.nn.Parameter] = []
        self._is_whole = False  # every rank of the replica holds the entire module
        self._uncertain: list[UncertainGradients] = []  # until their sums have ended
        self._split: list[torch.nn.Parameter] = []  # along dimensions with the same samples
        self.holds_gradients: Callable[[], bool] = lambda: False  # from unreduced passes

    def enter_across(self, across: OwnGroup) -> None:
        """Begin a new world."""
        self._across = across

    def leave(self) -> None:
        """Release everything that belongs to the ended world."""
        super().leave()
        self._across = self._end = self._room = None
        self._uncertain.clear()
        self._ends.clear()

    def begin(self, weight: float) -> None:
        """Begin a step in which this rank has the fraction ``weight`` of the global batch."""
        super().begin(weight)
        self._fault = self._end = self._pass = self._room = None
        self._uncertain.clear()
        self._ends.clear()

    @property
    def holds_unweighted(self) -> bool:
        """False: each backward pass multiplies its gradients by this rank's share."""
        return False

    @property
    def has_new_gradients(self) -> bool:
        """Same interface as for DDP; FSDP itself keeps gradients that are not reduced."""
        return self.is_done or self.holds_gradients()

    def has_even_share(self, weight: float) -> bool:
        """Whether this fraction of the global batch is the same on all ranks."""
        parts = self._across.size * self._replica.mesh.data_size if self._across is not None else 1
        return abs(weight * parts - 1.0) <= NEARLY

    def weigh_local(self, gradients: torch.Tensor, scale: float = 1.0) -> None:
        """Multiply by the ratio of this rank's share to an even one, before the reduce-scatter."""
        if self._across is None:
            return
        factor = self.weight * self._across.size * self._replica.mesh.data_size * scale
        if factor == 0.0:
            gradients.zero_()  # × 0 would keep a NaN of the filler sample
        elif abs(factor - 1.0) > NEARLY:
            gradients.mul_(factor)

    def reduce(self, gradients: torch.Tensor, unit: Unit | None = None) -> None:
        """Gradients of this rank's shards of ``unit``, averaged over the replica. Called by FSDP's
        hook."""
        if self._across is None:
            return
        self._end_pass_later()
        if self._across.size == 1:
            self._write_flags()
        elif self._fault is None:
            gradients.div_(self._across.size)
            self._sum(gradients, unit)
        self.reduced()

    def watch(self, parameters: CurrentParameters, *, is_whole: bool) -> None:
        """Without FSDP: sum the gradients of these parameters after each backward pass.

        ``is_whole``: every rank of the replica holds all of them. Its own samples, or a copy of
        another rank's samples, contribute to their gradients.
        """
        self._current, self._is_whole = parameters, is_whole
        self._read_parameters()

    def _read_parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters of now: a script may freeze, unfreeze and replace some."""
        assert self._current is not None
        trained = [p for p in self._current.read() if p.requires_grad]
        if list(map(id, trained)) != list(map(id, self._parameters)):
            known = set(map(id, self._hooked))
            for parameter in trained:
                if id(parameter) not in known:
                    parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                    self._hooked.append(parameter)
            self._parameters = trained
            self._note_split(trained)
        return trained

    def forward_begins(self) -> None:
        """As in the base class; from now on, watch parameters that were not trained before."""
        super().forward_begins()
        if self._current is not None:
            self._read_parameters()

    def _note_split(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note the parameters of which ranks with the same samples hold different parts."""
        mesh = self._replica.mesh
        self._split = [p for p in parameters if mesh.same_part_dims & sharded_over(p, mesh)]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._across is not None:
            self._end_pass_later()

    def _sum_all(self) -> None:
        """Sum the gradients of a module without FSDP.

        Those of an earlier pass are included: they are the same in all replicas, and the factors of
        all ranks add up to 1.
        """
        mesh = self._replica.mesh
        copies = mesh.size // mesh.data_size if self._is_whole else 1  # ranks with the same samples
        factor = 0.0 if self.weight == 0.0 else self.weight / copies
        self._sum_in_buckets(self._read_parameters(), factor)

    def _sum_in_buckets(self, parameters: Sequence[torch.nn.Parameter], factor: float) -> None:
        """Multiply by ``factor``, then sum over the replicas, and before that within this one if
        its ranks hold the entire module: one bucket per dtype.

        A parameter without a gradient counts as zeros (an expert without tokens). Each bucket has
        the number of ranks with a gradient, by parameter.
        """
        assert self._across is not None
        by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            place_like(parameter)
            by_dtype.setdefault(gradient_dtype(parameter), []).append(parameter)
        self.reduced()
        if self._across.size == 1:
            self._write_flags()
        unit = self._unit  # of the first bucket
        for same in by_dtype.values():
            gradients = [local_gradient(p) for p in same]
            is_used = [float(p.grad is not None and factor != 0.0) for p in same]
            counts = torch.tensor(is_used, device="cpu")
            if self._is_whole or self._across.size > 1:
                counts = self._sum_bucket(gradients, is_used, factor, unit)
            unit = None
            if not all(is_used):
                self._uncertain.append(UncertainGradients(same, gradients, counts))

    def _sum_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        counted: Sequence[float],
        factor: float,
        unit: Unit | None,
    ) -> torch.Tensor:
        """Sum these gradients in place, and return the sums of ``counted``. On a stream, both are
        only queued."""
        assert self._across is not None
        flat = [gradient.reshape(-1) for gradient in gradients]
        counts = flat[0].new_tensor(counted)
        bucket = torch.cat([*flat, counts, flat[0].new_empty(COUNT)])[:-COUNT]
        values, counts = bucket[: -len(counted)], bucket[-len(counted) :]
        values.zero_() if factor == 0.0 else values.mul_(factor)
        if self._is_whole:
            self._replica.all_reduce(bucket)
        if self._fault is None and self._across.size > 1:
            self._sum(bucket, unit)
        parts = torch.split(values, [gradient.numel() for gradient in gradients])
        copy_each(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
        return counts

    def _sum(self, gradients: torch.Tensor, unit: Unit | None = None) -> None:
        """Sum over the replicas, in place. On a stream the sum is only queued: :meth:`_settle`
        waits for it before the host depends on it. ``unit``: begins to be reduced."""
        assert self._across is not None
        room, end = self._room_with_flags(gradients, unit), None
        if room is None and unit is not None and (own := Room.behind(gradients)) is not None:
            write_present(end := own.end)
            gradients = own.both
        sent = gradients if room is None else room.both
        works = self._across.works
        try:
            if unit is not None and self.order is not None:
                is_marked = room is not None or end is not None
                self.order.before(unit, Sent.of(sent) if is_marked else None)
            work = self._across.all_reduce(sent)
            if self._across.is_on_stream:
                works.queue(work)
                _keep_until_summed(gradients)
            else:
                works.finish_one(work)
        except Exception as error:  # noqa: BLE001  raised at the end, on all ranks of the replica
            self._fault = error.with_traceback(None)
            return
        if room is not None:
            self._room = room
        if unit is not None and end is not None:
            self._ends.append((unit, end))

    def _finish_sums(self) -> None:
        """Wait for the sums of this backward pass, and read the flags summed with them."""
        if self._across is not None and self._across.is_on_stream and self._fault is None:
            try:
                self._across.works.settle()
            except Exception as error:  # noqa: BLE001  as above
                self._fault = error.with_traceback(None)
        room, self._room = self._room, None
        if room is not None and self._end is not None and self._fault is None:
            self._end.copy_(room.end)
        ends, self._ends = self._ends, []
        if self._fault is None:
            is_absent = absent([end for _, end in ends])
            names = [unit.name for (unit, _), lacks in zip(ends, is_absent, strict=True) if lacks]
            if names and self.order is not None:
                self._fault = others_without(names[0], self.order.step)

    def _room_with_flags(self, gradients: torch.Tensor, unit: Unit | None) -> Room | None:
        """A step's first bucket, followed by this rank's flags."""
        room = None if self._has_spoken or self.flags is None else Room.behind(gradients)
        if room is not None:
            room.end.copy_(self._write_flags(unit), non_blocking=True)
            assert self.flags is not None
            self.flags.write_digest(room.end)  # on the device
        return room

    def _write_flags(self, unit: Unit | None = None) -> torch.Tensor:
        """Write this rank's flags, once per step: to sum over its position in each replica, then
        over all ranks."""
        if self._end is None:
            self._end = torch.zeros(COUNT, dtype=torch.float64, device="cpu")
            if self.flags is not None and not self._has_spoken:
                self.flags.write(self._end, *([unit.name] if unit is not None else []))
            self._has_spoken = True
        return self._end

    def _end_pass_later(self) -> None:
        if backward_passes.are_nested():  # of recomputed parts, in the middle of a pass
            backward_passes.call_after_all(self._settle)
        elif self._pass != current_backward():
            self._pass = current_backward()
            call_after_backward(self._settle)  # after FSDP's own, which was queued before

    def _settle(self) -> None:
        """Called at the end of a backward pass."""
        backward_passes.cancel(self._settle)
        if self._current is not None:
            self._sum_all()
        self.settle([self])

    def settle(self, reductions: Sequence["AcrossReduction"]) -> None:
        """End the sums of these modules, of which only this one has sent flags: all ranks of the
        replica have them, or all raise."""
        for each in reductions:
            each._finish_sums()
        is_over = any(each._fault is not None or each._has_failed for each in reductions)
        end = in_replica(self._end.tolist()) if self._end is not None else [0.0] * COUNT
        used = [count for each in reductions for count in each._used()]
        try:
            begin, length = self._room_for(len(used))
            around = [0.0] * begin, [0.0] * (length - begin - len(used))
            values = [float(is_over), *end, *around[0], *used, *around[1]]
            faults, *summed = self._replica.sum_and_ask(values)
            if faults:
                own = [each._fault for each in reductions if each._fault is not None]
                raise own[0] if own else GroupAborted(_LEFT)
        except Exception as error:
            for each in reductions:
                each.failure = error.with_traceback(None)
            raise
        if self._end is not None:
            self._end.copy_(torch.tensor(summed[:COUNT], device="cpu"))
        counts = iter(summed[COUNT + begin :])
        for each in reductions:
            each._end = each._pass = None
            each._settle_uncertain({id(parameter): next(counts) for parameter in each._split})
        phases.enter(SCRIPT)

    def _room_for(self, count: int) -> tuple[int, int]:
        """Where this rank's ``count`` values begin among those that the replica sums, and the
        number of all."""
        return 0, count

    def _used(self) -> list[float]:
        """For each parameter of which other ranks of the replica hold other parts, the number of
        replicas with a gradient of this one, or 1."""
        if self._fault is not None:
            return [0.0] * len(self._split)
        counts: dict[int, float] = {}
        for each in self._uncertain:
            counts |= zip(map(id, each.parameters), each.users, strict=True)
        return [counts.get(id(parameter), 1.0) for parameter in self._split]

    def _settle_uncertain(self, in_replica: Mapping[int, float]) -> None:
        for each in self._uncertain:
            each.settle(in_replica)
        self._uncertain.clear()

    @property
    def _has_failed(self) -> bool:
        """Whether a collective of this world has failed and the script has caught its error."""
        return self._across is not None and self._across.works.may_be_garbage


def _keep_until_summed(gradients: torch.Tensor) -> None:
    """Prevent the allocator from reusing these gradients' memory for FSDP's next reduce-scatter
    before the current stream has summed them: with ``reduce_dtype`` FSDP drops its reference right
    after the hook (``foreach_reduce``; for its own all-reduce it keeps one until an event)."""
    if gradients.is_cuda:
        gradients.record_stream(torch.cuda.current_stream(gradients.device))
