"""Reduction for uneven shares: each rank's gradients are weighted by its samples, then summed.

A rank with n of the N samples of a step computes the gradient of the mean over its n samples. The
mean over all N is the sum over ranks of n/N times that gradient, for any split, including ranks
without samples.

On the CPU the reducer divides by the world's size while it fills its buckets, and passes them to
:class:`elastic.groups.collectives.ReleasableGroup`: if all shares are equal, no
multiplication is needed. On other devices buckets are passed to a communication hook.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.utils.hooks import RemovableHandle

from elastic.errors import TrainingError
from elastic.groups.pending import pending_works, queued
from elastic.hangs.page import SCRIPT, phases
from elastic.torch_private import NO_BACKWARD, call_after_backward, current_backward
from elastic.train.order import ControlFlags, ReductionOrder, Room, Sent, Unit

# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.


NEARLY = 1e-12  # tolerance for n/N times the size being 1


class Filler:
    """Lets backward passes add nothing to the gradients of parameters: this rank has no samples.

    A weight of 0 would not do where ``.grad`` has gradients of earlier passes, or where the weights
    of all ranks are to add up to 1.
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on, backward passes add zeros, whatever the filler's loss is, NaN included."""
        trained = (p for p in parameters if p.requires_grad)
        self._hooks = [p.register_hook(torch.zeros_like) for p in trained]  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Backward passes add gradients again."""
        while self._hooks:
            self._hooks.pop().remove()


class Reduction:
    """The state of one module's gradient reduction, and this rank's weight."""

    def __init__(self) -> None:
        self.is_done = False
        self.has_forward = False  # a forward pass of this step expects a backward pass
        self.is_announced = False  # a forward pass has begun since the last reduction
        self.elements = 0  # of all gradients reduced in this world
        self.is_late = False  # a backward pass ran one step after its forward pass
        self.is_local = False  # the weights' .grad contains unreduced gradients of this rank
        self._partial: TrainingError | None = None  # a pass that is not reduced has added to .grad
        self._is_partial_earlier = False  # in an earlier step
        self.failure: BaseException | None = None  # kept even if the script caught it
        self.works: list[dist.Work] = []  # of this step, on asynchronous devices
        self.is_static = False  # DDP reduces at the end of the first backward pass, and waits there
        self.flags: ControlFlags | None = (
            None  # the flags that ranks exchange with the first bucket
        )
        self.group: dist.ProcessGroup | None = None  # of the current world
        self._divisor = 1  # by which the reducer has already divided the gradients
        self._weight = 1.0
        self._mark = 0  # the position after the last work
        self._first_backward: int | None = None  # of this world
        self._backward = NO_BACKWARD  # the backward pass at whose end this rank waits
        self._has_spoken = False
        self._has_accumulated = False  # in this step
        self._room: Room | None = None  # in the first bucket
        self.order: ReductionOrder | None = None  # in which all modules are reduced
        self._unit: Unit | None = None  # this module in it
        self._matched: int | None = None  # the last backward pass of which ranks know the order

    def match(self, order: ReductionOrder, unit: Unit) -> None:
        """Compare the order of reductions with the other ranks', under the name of ``unit``."""
        self.order, self._unit = order, order.add(unit)

    def enter(self, group: dist.ProcessGroup, *, is_divided: bool) -> None:
        """Begin a new world; gradients may arrive divided by its size."""
        self.group = group
        self._divisor = group.size() if is_divided else 1
        self._first_backward = None
        self.elements = 0

    def leave(self) -> None:
        """Release everything that belongs to the ended world."""
        self.group = self._room = None
        self.is_static = False
        self.works.clear()
        if self.flags is not None:
            self.flags.forget()

    def begin(self, weight: float) -> None:
        """Begin a step in which this rank has the fraction ``weight`` of the global batch."""
        self._weight = weight
        self.is_done = self._has_spoken = False
        self._has_accumulated = self.has_forward = False
        self.failure = self._matched = None
        self._is_partial_earlier = self._partial is not None
        self.works.clear()

    @property
    def weight(self) -> float:
        """This rank's fraction of the global batch."""
        return self._weight

    @property
    def is_complete(self) -> bool:
        """Whether an optimizer may use the gradients: they are reduced."""
        return self.is_done and self._partial is None

    @property
    def hint_of_unreduced(self) -> str:
        """What to write, if :attr:`is_complete` is False before an update."""
        if self.has_forward:
            return (
                "only loss.backward() averages gradients over the ranks: from torch.autograd.grad, "
                "or set by hand, they are those of this rank. For several losses (PCGrad), call "
                "model(…) and loss.backward() for each, and combine the resulting p.grad"
            )
        return (
            "call the wrapped module, in train mode, in the forward pass of each backward: not "
            "model.module, and not its parameters. A gradient g that the script computes itself "
            "(Reptile) is that of (g.detach() * p).sum(), in the wrapped module's forward method"
        )

    @property
    def has_new_gradients(self) -> bool:
        """Whether a backward pass of this step has added to the gradients."""
        return self.is_done or self._has_accumulated

    def accumulates(self) -> None:
        """Note a forward pass under ``no_sync()``: its gradients are reduced with later ones."""
        self.is_local = self._has_accumulated = True

    def refuse_partial(self) -> None:
        """Raise TrainingError if a pass has added gradients that are not reduced."""
        if self._partial is not None:
            raise self._partial

    def refuse_earlier_partial(self) -> None:
        """Raise TrainingError if a pass of an earlier step has done so: a death would lose them."""
        if self._is_partial_earlier:
            self.failure = self._partial
            self.refuse_partial()

    def adds_partially(self, kind: str) -> None:
        """Note that a second backward pass over one forward pass of a ``kind`` has computed
        gradients of only some of its parameters. DDP sums gradients in buckets of several, so these
        are not reduced, until a pass over all parameters is."""
        self._partial = TrainingError(
            f"a second backward pass over one forward pass of {kind} has computed gradients of "
            "only some of its parameters: they are not averaged over the ranks",
            hint="call zero_grad() before the next loss, if they are not used (an actor's loss "
            "through its critic); else call backward() once, for the sum of the losses, or call "
            "the wrapped module for each; or run.wrap(model, find_unused_parameters=True)",
        )

    def forward_begins(self) -> None:
        """Note a forward pass of this step that expects a backward pass."""
        self.has_forward = self.is_announced = True

    @property
    def is_reduced(self) -> bool:
        """Whether this step's gradients are reduced, and no forward pass has begun since."""
        return self.is_done and not self.is_announced

    def reduced(self) -> None:
        """Note that a bucket is reduced: this step's gradients and those accumulated before."""
        self.is_done = True
        self.is_announced = self._is_partial_earlier = False
        self._partial = None  # the sum is reduced
        self.is_late = self.is_late or not self.has_forward
        self.is_local = False

    def forget_gradients(self) -> None:
        """Note that an optimizer has used the gradients, or they were dropped."""
        self.is_local = self.is_late = False

    def rescale(self, weight: float) -> float:
        """The factor for gradients in ``.grad`` before they are reduced with those of a step in
        which this rank has another weight, which is not 0 if some are local.

        Gradients of an earlier reduction are among them: they are the same on all ranks, whose
        weights added up to 1.
        """
        if not (self.is_local or self._partial) or abs(weight - self._weight) <= NEARLY:
            return 1.0
        return self._weight / weight

    def weigh(self, gradients: torch.Tensor) -> None:
        """Multiply a bucket's gradients by the remaining factor of this rank's weight."""
        factor = self._weight * self._divisor
        if factor == 0.0:
            gradients.zero_()  # × 0 would keep a NaN of the filler sample
        elif abs(factor - 1.0) > NEARLY:
            gradients.mul_(factor)

    def all_reduce(self, tensor: torch.Tensor, options: dist.AllreduceOptions) -> dist.Work:
        """Begin to sum a bucket of gradients on the CPU, or the map of used parameters; the end
        of the backward pass waits for it, before the reducer does."""
        group = self.group
        assert group is not None
        if tensor.is_floating_point() or tensor.is_complex():  # gradients
            self.weigh(tensor)
            self.reduced()
            self.elements += tensor.numel()
            if self._divisor > 1:
                tensor = self._matching(tensor)
            elif self.order is not None:
                self.order.sums.reduced_alone()
        work = group.allreduce([tensor], options)
        pending_works().begin(work)
        backward = current_backward()
        if backward == NO_BACKWARD or self._is_late(backward):  # DDP.join() calls this outside
            self.finish()
        elif backward != self._backward:
            self._backward = backward
            call_after_backward(self.finish)  # before the reducer's callback
        return work

    def queue(self, tensor: torch.Tensor, options: dist.AllreduceOptions) -> dist.Work:
        """Begin to sum the map of used parameters, on an asynchronous device."""
        assert self.group is not None
        work = self.group.allreduce([tensor], options)
        self._queued(work)
        return work

    def _queued(self, work: dist.Work) -> None:
        self.works.append(work)
        self._mark = pending_works().mark()
        queued()

    def _is_late(self, backward: int) -> bool:
        """Whether the reducer waits before another callback is called."""
        if self._first_backward is None:
            self._first_backward = backward
        return self.is_static and backward == self._first_backward

    def finish(self) -> None:
        """Wait for all pending work; raise its error, or GroupAborted.

        The reducer waits right after this, in a wait that cannot be interrupted.
        """
        try:
            pending_works().finish()
            if self.order is not None:
                self.order.sums.summed()
        except Exception as error:
            self.failure = error.with_traceback(None)  # its frames hold the group
            raise
        phases.enter(SCRIPT)  # only negligible work remains in the backward pass

    def _matching(self, gradients: torch.Tensor) -> torch.Tensor:
        """The gradients of a bucket; the first ones of a backward pass followed by this rank's
        flags, once the other ranks are known to reduce this module next.

        Raises TrainingError if they are not.
        """
        backward = current_backward()
        is_first, self._matched = backward != self._matched, backward
        self._has_spoken = self._has_spoken and not (is_first and self.order is not None)
        sent = self.with_words(gradients)
        if is_first and self.order is not None and self._unit is not None:
            first = Sent.of(sent) if sent is not gradients else None
            try:
                self.order.before(self._unit, first)
            except Exception as error:
                self.failure = error.with_traceback(None)
                raise
        return sent

    def before_plan(self) -> None:
        """Call it before the reducer distributes a plan for other buckets."""
        if self.order is not None and self._unit is not None:
            self.order.before_once(self._unit)

    def speak_again(self) -> None:
        """Also send this rank's flags with the next bucket: peers begin another step."""
        if self.flags is not None:
            self.flags.abstain()
        self._has_spoken = False
        self._matched = None
        if self.order is not None:
            self.order.begin_again()
        self.has_forward = True  # of a peer

    def with_words(self, gradients: torch.Tensor) -> torch.Tensor:
        """The gradients of a step's first bucket, followed by this rank's flags."""
        if self.flags is None or self._has_spoken or gradients.layout is not torch.strided:
            return gradients  # sparse ones have no room for flags: a dense bucket follows
        self._has_spoken = True
        sums = self.order.sums if self.order is not None else None
        numbers = sums.room(gradients.dtype) if sums is not None else 0
        room = self._room
        if room is None or not room.is_behind(gradients) or room.numbers.numel() != numbers:
            if room is not None:
                self.flags.keep(room.end)
            room = self._room = Room.behind(gradients, numbers, room)
        if room is None:
            return gradients
        if sums is not None and numbers:
            sums.write(room.numbers)
        self.flags.write(room.end, *([self._unit.name] if self._unit is not None else []))
        self.flags.write_digest(room.end)
        return room.both

    def wait(self) -> None:
        """Wait until every collective of this step has succeeded, else raise.

        NCCL's collectives end long after the host has queued later work. When a peer dies and
        the group is aborted, queued work still runs: an optimizer would step on half-reduced
        gradients. So the host waits before an optimizer is queued, and checks whether the group was
        aborted: the end of an aborted collective implies nothing (docs/explanation/protocol.md,
        section 6).
        """
        for work in self.works:
            pending_works().finish_on_stream(work)
        if self.works:
            pending_works().covered(self._mark)
        if self.works and self.flags is not None:
            self.flags.copy_to_host()
        if self.works and self.order is not None:
            self.order.sums.summed()
        self.works.clear()


def weighted_sum(state: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: scale this rank's bucket by its weight and sum over all ranks."""
    gradients, group = bucket.buffer(), state.group
    assert group is not None
    state.weigh(gradients)
    state.reduced()
    state.elements += gradients.numel()
    if group.size() == 1:
        if state.order is not None:
            state.order.sums.reduced_alone()
        alone: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        alone.set_result(gradients)
        return alone
    work = dist.all_reduce(state._matching(gradients), async_op=True)
    assert work is not None  # None only on ranks outside the group
    state._queued(work)
    on_device: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: _without_words(future.value()[0], gradients.numel())
    )
    return on_device


def _without_words(summed: torch.Tensor, count: int) -> torch.Tensor:
    return summed if summed.numel() == count else summed[:count]
