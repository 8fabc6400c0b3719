"""Gradients of uneven shares: every rank's are weighted by its samples, then summed.

A rank that holds n of the N samples of a step has the gradient of the mean over its n. The mean
over all N is the sum over ranks of n/N times that, for any split, down to a rank with nothing.

On the CPU the reducer divides by the world's size while it fills its buckets, and hands them to
:class:`elastic.process_group.ReleasableGroup`: where all shares are equal nothing is
left to multiply. On other devices buckets come to a communication hook.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from elastic.hangs.facts import SCRIPT
from elastic.hangs.phases import phases
from elastic.process_group import pending_works, queued
from elastic.torch_private import call_after_backward, current_backward
from elastic.training.gradients.control_flags import ControlFlags, Room

_OUTSIDE = -1  # of every backward pass
NEARLY = 1e-12  # n/N times the size, where it is 1 but for rounding


class Reduction:
    """How one module's gradients are reduced: this rank's weight, and whether they were."""

    def __init__(self) -> None:
        self.is_done = False
        self.has_forward = False  # some pass of this step is to be followed by a backward pass
        self.is_late = False  # a backward pass came in the step after that of its forward pass
        self.is_local = False  # gradients of this rank are in the weights' .grad, not reduced yet
        self.failure: BaseException | None = None  # also if the script swallowed it
        self.works: list[dist.Work] = []  # of this step, on devices that run ahead of the host
        self.is_static = False  # DDP reduces at the end of the first backward pass, and waits there
        self.flags: ControlFlags | None = (
            None  # the flags that ranks exchange with the first bucket
        )
        self.group: dist.ProcessGroup | None = None  # of the present world
        self._divisor = 1  # by which the reducer has divided what comes here
        self._weight = 1.0
        self._first_backward: int | None = None  # pass in this world
        self._backward = _OUTSIDE  # the pass at whose end this rank waits
        self._has_spoken = False
        self._has_accumulated = False  # in this step
        self._is_mixed = False  # the weights' .grad hold gradients that are reduced
        self._room: Room | None = None  # in the first bucket

    def enter(self, group: dist.ProcessGroup, *, is_divided: bool) -> None:
        """A new world; gradients may come here divided by its size."""
        self.group = group
        self._divisor = group.size() if is_divided else 1
        self._first_backward = None

    def leave(self) -> None:
        """Hold nothing of the world that is over."""
        self.group = self._room = None
        self.is_static = False
        self.works.clear()
        if self.flags is not None:
            self.flags.forget()

    def begin(self, weight: float) -> None:
        """A new step, in which this rank holds the part ``weight`` of the global batch."""
        self._weight = weight
        self.is_done = self._has_spoken = False
        self._has_accumulated = self.has_forward = False
        self.failure = None
        self.works.clear()

    @property
    def weight(self) -> float:
        """This rank's part of the global batch."""
        return self._weight

    @property
    def has_new_gradients(self) -> bool:
        """Whether a backward pass of this step has added to the gradients."""
        return self.is_done or self._has_accumulated

    def accumulates(self) -> None:
        """A forward pass under ``no_sync()``: its gradients are reduced with later ones."""
        self.is_local = self._has_accumulated = True

    def reduced(self) -> None:
        """A bucket of this step's gradients, and of those accumulated before, is summed up."""
        self.is_done = self._is_mixed = True
        self.is_late = self.is_late or not self.has_forward
        self.is_local = False

    def forget_gradients(self) -> None:
        """An optimizer has used them, or they are dropped."""
        self.is_local = self._is_mixed = self.is_late = False

    def rescale(self, weight: float) -> float | None:
        """What local gradients have to be multiplied with, to be reduced with those of a step in
        which this rank holds another part, ``weight``. None: they cannot be."""
        if not self.is_local or abs(weight - self._weight) <= NEARLY:
            return 1.0
        return None if self._is_mixed or not weight else self._weight / weight

    def weigh(self, gradients: torch.Tensor) -> None:
        """Multiply a bucket's gradients with what is missing of this rank's weight."""
        factor = self._weight * self._divisor
        if factor == 0.0:
            gradients.zero_()  # × 0 would keep a NaN of the sample that only filled a gap
        elif abs(factor - 1.0) > NEARLY:
            gradients.mul_(factor)

    def all_reduce(self, tensor: torch.Tensor, options: dist.AllreduceOptions) -> dist.Work:
        """Begin to sum up a bucket of gradients on the CPU, or which parameters were used; the end
        of the backward pass waits for it, before the reducer does."""
        group = self.group
        assert group is not None
        if tensor.is_floating_point() or tensor.is_complex():  # gradients
            self.weigh(tensor)
            self.reduced()
            if self._divisor > 1:
                tensor = self.with_words(tensor)
        work = group.allreduce([tensor], options)
        pending_works().begin(work)
        backward = current_backward()
        if backward == _OUTSIDE or self._is_late(backward):  # DDP.join() calls this outside
            self.finish()
        elif backward != self._backward:
            self._backward = backward
            call_after_backward(self.finish)  # before the reducer's own
        return work

    def queue(self, tensor: torch.Tensor, options: dist.AllreduceOptions) -> dist.Work:
        """Begin to sum up which parameters were used, on a device that runs ahead of the host."""
        assert self.group is not None
        work = self.group.allreduce([tensor], options)
        self.works.append(work)
        queued()
        return work

    def _is_late(self, backward: int) -> bool:
        """Whether the reducer waits before another callback is called."""
        if self._first_backward is None:
            self._first_backward = backward
        return self.is_static and backward == self._first_backward

    def finish(self) -> None:
        """Return when what was begun has ended well; raise what went wrong, or GroupAborted.

        The reducer waits right after this, where nothing could release it.
        """
        try:
            pending_works().finish()
        except Exception as error:
            self.failure = error.with_traceback(None)  # its frames hold the group
            raise
        phases.enter(SCRIPT)  # the backward pass is over, but for what takes no time

    def speak_again(self) -> None:
        """Send this rank's flags with the next bucket, too: peers begin another step."""
        if self.flags is not None:
            self.flags.abstain()
        self._has_spoken = False
        self.has_forward = True  # on a peer

    def with_words(self, gradients: torch.Tensor) -> torch.Tensor:
        """The gradients of a step's first bucket, followed by this rank's flags."""
        if self.flags is None or self._has_spoken or gradients.layout is not torch.strided:
            return gradients  # behind sparse ones there is no room: a dense bucket comes later
        self._has_spoken = True
        room = self._room
        if room is None or not room.is_behind(gradients):
            room = self._room = Room.behind(gradients)
        if room is None:
            return gradients
        self.flags.write(room.end)
        return room.both

    def wait(self) -> None:
        """Return once every collective of this step has ended well, else raise.

        NCCL's collectives end long after the host has queued what follows. When a peer dies and
        the group is aborted, what was queued runs: an optimizer would step on half-reduced
        gradients. So the host waits before it lets one be queued, and looks whether the group was
        aborted: the end of such a collective implies nothing (PROTOCOL section 6).
        """
        for work in self.works:
            pending_works().finish_on_stream(work)
        if self.works and self.flags is not None:
            self.flags.settle()
        self.works.clear()


def weighted_sum(state: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: scale this rank's bucket by its weight and add all ranks' up."""
    gradients, group = bucket.buffer(), state.group
    assert group is not None
    state.weigh(gradients)
    state.reduced()
    if group.size() == 1:
        alone: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        alone.set_result(gradients)
        return alone
    work = dist.all_reduce(state.with_words(gradients), async_op=True)
    assert work is not None  # None only on ranks outside the group
    state.works.append(work)
    queued()
    on_device: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: _without_words(future.value()[0], gradients.numel())
    )
    return on_device


def _without_words(summed: torch.Tensor, count: int) -> torch.Tensor:
    return summed if summed.numel() == count else summed[:count]
