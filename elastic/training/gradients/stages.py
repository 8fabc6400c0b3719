"""Gradients of pipeline stages: summed once per step, when the script calls for it.

A schedule runs one backward pass per micro-batch, at other times on each stage, and some of its
passes fill ``.grad`` without hooks. A collective of the replica at the end of a backward pass would
also block the pass that the previous stage waits for. So with a dimension ``pp`` backward passes
only accumulate, and the ranks of the replica meet in ``run.reduce_gradients()``.

FSDP still reduces within the stage in its backward passes; of its gradients, the sum over the
replicas is postponed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from checkpoints.tensors.dtensors import is_dtensor
from elastic.errors import ConfigError, TrainingError
from elastic.mesh import ModelReplica
from elastic.training.gradients.across import AcrossReduction
from elastic.training.gradients.matching.order import Unit

_SCHEDULES = "torch.distributed.pipelining.schedules"


class StageReduction(AcrossReduction):
    """Sums the gradients of one module over the replicas, and over the ranks of this one that hold
    the same stage entirely. Never over stages."""

    hint_of_unreduced = (
        "call run.reduce_gradients() after the last backward pass, before clip_grad_norm_ and "
        "optimizer.step()"
    )

    def __init__(
        self,
        replica: ModelReplica,
        parameters: Callable[[], Iterable[nn.Parameter]],
        *,
        has_fsdp: bool,
    ) -> None:
        super().__init__(replica)
        self._all_parameters = parameters
        self._has_fsdp = has_fsdp
        has_peers = bool(replica.mesh.dims_of_stage)  # other ranks of the replica with this stage
        self._is_whole = has_peers and not any(map(is_dtensor, parameters()))

    @property
    def is_complete(self) -> bool:
        """As in the base class, and no forward pass has begun since."""
        return self.is_done and not self.is_local

    @property
    def has_new_gradients(self) -> bool:
        """As in the base class; passes that are not summed yet count."""
        return super().has_new_gradients or self._has_accumulated

    @property
    def holds_unweighted(self) -> bool:
        """Whether backward passes have left gradients that a later sum multiplies by this rank's
        share of the samples. FSDP multiplies in each pass."""
        return self.is_local and not self._has_fsdp

    def forward_begins(self) -> None:
        """As in the base class: the gradients of this pass are summed later."""
        super().forward_begins()
        if self._across is not None:
            self.accumulates()

    def reduce(self, gradients: torch.Tensor, unit: Unit | None = None) -> None:
        """Keep them: they are summed over the replicas when the script calls for it."""

    @property
    def fault(self) -> Exception | None:
        """The error of a sum over the replicas, until the ranks of this one have agreed on it."""
        return self._fault

    @property
    def has_accumulated(self) -> bool:
        """Whether backward passes have accumulated gradients, as far as is known before the sum."""
        return self.is_local or self.has_gradients

    def sum_accumulated(self, fault: Exception | None = None) -> None:
        """Sum what backward passes have accumulated: also if there is nothing, which other replicas
        do not know. After the ``fault`` of another module, only within the replica."""
        self._fault = self._fault or fault
        self.has_forward = True  # also if the script calls only parts of the module
        parameters = [p for p in self._all_parameters() if p.requires_grad]
        if self.holds_gradients():
            raise TrainingError(
                "run.reduce_gradients() while FSDP holds gradients of passes under "
                "set_requires_gradient_sync(False)",
                hint="call model.set_requires_gradient_sync(True) before the last backward pass; "
                "the schedules of torch.distributed.pipelining do",
            )
        self._note_split(parameters)
        assert self._across is not None
        if self._has_fsdp:
            self._sum_in_buckets(parameters, 1.0 / self._across.size)
            return
        mesh = self._replica.mesh
        copies = mesh.size // mesh.stages // mesh.data_size if self._is_whole else 1
        self._sum_in_buckets(parameters, 0.0 if self.weight == 0.0 else self.weight / copies)

    def _room_for(self, count: int) -> tuple[int, int]:
        """As in the base class: each stage has its own values."""
        mesh = self._replica.mesh
        stage = mesh.stage_of(self._replica.position)
        if stage is None or not mesh.same_part_dims:
            return 0, count
        own = [float(count) if n == stage.index else 0.0 for n in range(stage.count)]
        counts = [round(total) // len(stage.ranks) for total in self._replica.sum(own)]
        return sum(counts[: stage.index]), sum(counts)

    @property
    def has_gradients(self) -> bool:
        """Whether some parameter has a gradient."""
        return any(p.grad is not None for p in self._all_parameters())

    def send_flags(self) -> None:
        """Send this rank's control flags unless they were sent with gradients."""
        assert self._across is not None
        if self._across.size == 1:
            self._write_flags()
        elif self.flags is not None and not self._has_spoken:
            self._sum(torch.empty(0, dtype=torch.float64, device=self._replica.device))


def refuse_split_backward(name: str) -> None:
    """Raise ConfigError if the forward pass of a stage with several ``fully_shard`` is called by a
    schedule that computes the gradients of inputs and of weights in separate passes.

    FSDP takes the inner parts' gradients in the first of them, in which there are none: they stay
    None, or lack some micro-batches, without an error [measured, torch 2.13]. A stage with one
    ``fully_shard`` is reduced by the schedule (``perform_reduce_grad`` in
    torch/distributed/pipelining/stage.py).
    """
    frame = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_SCHEDULES):
        frame = frame.f_back  # type: ignore[assignment]
    schedule = frame.f_locals.get("self") if frame is not None else None
    order = getattr(schedule, "pipeline_order", None) or {}
    actions = (action for row in order.values() for action in row if action is not None)
    if any(action.computation_type.name == "BACKWARD_WEIGHT" for action in actions):
        raise ConfigError(
            f"{type(schedule).__name__} with several fully_shard in the stage {name}: it computes "
            "gradients of weights in passes of their own, and torch loses those of the inner parts",
            hint="apply fully_shard once to each stage: "
            'fully_shard(stage, mesh=run.mesh["shard"]), or use ScheduleInterleaved1F1B',
        )


def reduce_stages(reductions: Sequence[StageReduction]) -> None:
    """Sum the gradients of all modules of this rank. All ranks call it once per step.

    ``reductions``: the first one sends the control flags. Raises TrainingError if there are no
    gradients; the error of a collective, or GroupAborted, on all
    ranks of a replica together.
    """
    if not any(each.has_accumulated for each in reductions):
        raise _without_gradients()
    fault = None
    for each in reductions:
        each.sum_accumulated(fault)
        fault = each.fault
    if fault is None:
        reductions[0].send_flags()
    reductions[0].settle(reductions)
    if not any(each.has_gradients for each in reductions):
        raise _without_gradients()


def _without_gradients() -> TrainingError:
    return TrainingError(
        "run.reduce_gradients() without gradients: no backward pass has run since the last "
        "optimizer.zero_grad()",
        hint="call it after the backward passes of all micro-batches, before "
        "clip_grad_norm_ and optimizer.step()",
    )
