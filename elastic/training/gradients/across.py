"""Gradients of sharded models, reduced across replicas: each position's shards by itself.

FSDP has averaged them over the ranks of the replica that split its samples (reduce-scatter); what
is left is the sum over replicas. ``FSDPModule.set_all_reduce_hook`` calls :meth:`AcrossReduction.
reduce` with each group of parameters, in Python, in the middle of the backward pass
(``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). Where the world is
over, nothing is raised there: FSDP's collectives within the replica go on, on all of its ranks
alike, and at the end of the backward pass the replica settles whether the gradients are any.

Modules with DTensors but without FSDP (tensor parallelism alone) have their local gradients summed
in buckets, once the backward pass has ended.

Shares of the batch may differ by a sample, between replicas and within one. So a rank's gradients
are weighted before the reduce-scatter, by its share over that of an even split.
"""

# No `from __future__ import annotations`: as in reduction.py.
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic.errors import GroupAborted, TrainingError
from elastic.hangs.facts import SCRIPT
from elastic.hangs.phases import phases
from elastic.mesh import ModelReplica
from elastic.process_group import OwnGroup
from elastic.torch_private import (
    call_after_backward,
    copy_each,
    current_backward,
    reduce_scatter,
)
from elastic.training.gradients.control_flags import COUNT
from elastic.training.gradients.reduction import NEARLY, Reduction
from elastic.training.gradients.sharding import local_value

_LEFT = "the world is over for a rank of this replica: the gradients of this step are incomplete"


class AcrossReduction(Reduction):
    """How the gradients of one module's shards are summed over the replicas of a world."""

    def __init__(self, replica: ModelReplica) -> None:
        super().__init__()
        self._replica = replica
        self._across: OwnGroup | None = None  # None: in no world
        self._fault: Exception | None = None  # of this rank, not settled yet
        self._pass: int | None = None  # the backward pass that ends with a call of _settle
        self._end: torch.Tensor | None = None  # flags of this step, on their way
        self._end_work: dist.Work | None = None
        self._parameters: list[torch.nn.Parameter] = []  # of a module without FSDP
        self._summed: list[weakref.ref[torch.Tensor]] = []  # their gradients
        self.holds_gradients: Callable[[], bool] = lambda: False  # of passes that reduced none

    def enter_across(self, across: OwnGroup) -> None:
        """A new world."""
        self._across = across

    def leave(self) -> None:
        """Hold nothing of the world that is over."""
        super().leave()
        self._across = self._end = self._end_work = None

    def begin(self, weight: float) -> None:
        """A new step, in which this rank holds the part ``weight`` of the global batch."""
        super().begin(weight)
        self._fault = self._end = self._end_work = self._pass = None

    @property
    def has_new_gradients(self) -> bool:
        """As of any module; FSDP keeps gradients that are not reduced by itself."""
        return self.is_done or self.holds_gradients()

    def weigh_local(self, gradients: torch.Tensor) -> None:
        """Before the reduce-scatter: multiply by this rank's share over that of an even split."""
        if self._across is None:
            return
        factor = self.weight * self._across.size * self._replica.mesh.data_size
        if factor == 0.0:
            gradients.zero_()  # × 0 would keep a NaN of the sample that only filled a gap
        elif abs(factor - 1.0) > NEARLY:
            gradients.mul_(factor)

    def reduce(self, gradients: torch.Tensor) -> None:
        """FSDP's hook: gradients of this rank's shards, averaged over the replica."""
        if self._across is None:
            return
        self._end_pass_later()
        self._send_flags()
        if self._across.size > 1 and self._fault is None:
            gradients.div_(self._across.size)
            self._sum(gradients)
        self.reduced()

    def watch(self, parameters: list[torch.nn.Parameter]) -> None:
        """Without FSDP: sum up the gradients of these at the end of each backward pass."""
        self._parameters = [p for p in parameters if p.requires_grad]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._across is None:
            return
        if any(parameter.grad is known() for known in self._summed):
            raise TrainingError(
                "a second backward pass adds to gradients that are summed over the replicas: "
                "without fully_shard they are reduced once per step",
                hint="optimizer.zero_grad() before each backward pass; for several passes per step "
                'fully_shard(model, mesh=run.mesh["shard"])',
            )
        self._end_pass_later()
        self._send_flags()

    def _sum_all(self) -> None:
        """The gradients of a module without FSDP: one bucket for each type of elements."""
        assert self._across is not None
        lacking = sum(p.grad is None for p in self._parameters)
        if lacking:
            raise TrainingError(
                f"{lacking} parameters got no gradient in a backward pass: without fully_shard "
                "all replicas reduce all of them",
                hint="parameter.requires_grad_(False) before run.wrap for what is not trained",
            )
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self._summed = [weakref.ref(gradient) for gradient in gradients]
        local: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            shard = local_value(gradient.detach())
            local.setdefault(shard.dtype, []).append(shard)
        self.reduced()
        if self._across.size == 1:
            return
        for shards in local.values():
            bucket = torch.cat([shard.reshape(-1) for shard in shards])
            bucket.zero_() if self.weight == 0.0 else bucket.mul_(self.weight)
            if self._fault is None:
                self._sum(bucket)
            parts = torch.split(bucket, [shard.numel() for shard in shards])
            copy_each(shards, [p.view_as(s) for p, s in zip(parts, shards, strict=True)])

    def _sum(self, tensor: torch.Tensor) -> None:
        assert self._across is not None
        try:
            self._across.works.finish_one(self._across.all_reduce(tensor))
        except Exception as error:  # noqa: BLE001  raised at the end, on all ranks of the replica
            self._fault = error.with_traceback(None)

    def _end_pass_later(self) -> None:
        if self._pass != current_backward():
            self._pass = current_backward()
            call_after_backward(self._settle)  # after FSDP's own, which was queued before

    def _send_flags(self) -> None:
        """This rank's flags, once a step: to its position here, to the others in the replica."""
        if self.flags is None or self._end is not None:
            return
        self._end = torch.zeros(COUNT, dtype=torch.float64)
        self.flags.write(self._end)
        if self._across is not None and self._across.size > 1 and self._fault is None:
            self._end_work = self._across.all_reduce(self._end)
            self._across.works.begin(self._end_work)

    def _settle(self) -> None:
        """The end of a backward pass: all ranks of the replica have the sum, or all raise."""
        if self._parameters:
            self._sum_all()
        if self._end_work is not None and self._across is not None and self._fault is None:
            try:
                self._across.works.finish_one(self._end_work)
            except Exception as error:  # noqa: BLE001  as above
                self._fault = error.with_traceback(None)
        self._end_work = None
        end = self._end if self._end is not None else torch.zeros(COUNT)
        try:
            faults, *flags = self._replica.sum([float(self._fault is not None), *end.tolist()])
        except Exception as error:
            self.failure = error.with_traceback(None)
            raise
        if faults:
            self.failure = self._fault or GroupAborted(_LEFT)
            raise self.failure
        if self._end is not None:
            self._end.copy_(torch.tensor(flags))
        self._pass = None
        phases.enter(SCRIPT)


class WeightedReduceScatter:
    """FSDP's reduce-scatter, of weighted gradients (``FSDPModule.set_custom_reduce_scatter``)."""

    def __init__(self, reduction: AcrossReduction) -> None:
        self._reduction = reduction

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As FSDP's."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._reduction.weigh_local(input_tensor)
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
