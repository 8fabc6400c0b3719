"""Gradients of uneven shares: every rank's are weighted by its samples, then summed.

A rank that holds n of the N samples of a step has the gradient of the mean over its n. The mean
over all N is the sum over ranks of n/N times that, for any split, down to a rank with nothing.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from elastic.clock import SYSTEM_CLOCK
from elastic.training.words import Words
from elastic.worker.pending import pending

WAIT_SLICE_S = 20e-6


class Reduction:
    """The communication hook's state: this rank's weight, and whether gradients were reduced."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.is_done = False
        self.failure: BaseException | None = None  # also if the script swallowed it
        self.works: list[dist.Work] = []  # of this step, on devices that run ahead of the host
        self.words: Words | None = None  # what ranks tell each other with the first bucket
        self.room: torch.Tensor | None = None  # for that bucket and the words

    def begin(self, weight: float) -> None:
        """A new step, in which this rank holds the part ``weight`` of the global batch."""
        self.weight = weight
        self.is_done = False
        self.failure = None
        self.works.clear()

    def wait(self) -> None:
        """Return once every collective of this step has ended well, else raise.

        NCCL's collectives end long after the host has queued what follows. When a peer dies and
        the group is aborted, what was queued runs: an optimizer would step on half-reduced
        gradients. So the host waits before it lets one be queued (PROTOCOL section 6).
        """
        for work in self.works:
            while not work.is_completed():
                SYSTEM_CLOCK.sleep(WAIT_SLICE_S)
            if not work.is_success():
                work.wait()  # raises what went wrong
        if self.works and self.words is not None:
            self.words.settle()
        self.works.clear()

    def weigh(self, bucket: GradBucket) -> torch.Tensor:
        """The bucket's gradients times this rank's weight; behind them its words, if it is the
        first one."""
        gradients = bucket.buffer()
        if self.words is not None and bucket.index() == 0 and dist.get_world_size() > 1:
            room = self.words.append(gradients, self.weight, self.room)
            if room is not None:
                self.room = room
                return room
        if self.weight == 0.0:
            gradients.zero_()  # × 0 would keep a NaN of the sample that only filled a gap
        elif self.weight != 1.0:
            gradients.mul_(self.weight)
        return gradients

    def take(self, summed: torch.Tensor, count: int) -> torch.Tensor:
        """The gradients of what all ranks have sent, without their words: those are heard."""
        if summed.numel() == count:
            return summed
        assert self.words is not None
        self.words.hear(summed[count:])
        return summed[:count]


def weighted_sum(state: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: scale this rank's bucket by its weight and add all ranks' up."""
    gradients = state.weigh(bucket)
    count = bucket.buffer().numel()
    state.is_done = True
    if dist.get_world_size() == 1:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None  # None only on ranks outside the group
    if gradients.device.type != "cpu":
        state.works.append(work)
        on_device: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda future: state.take(future.value()[0], count)
        )
        return on_device
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def done(error: BaseException | None) -> None:
        # Not passed on as an exception: the autograd engine waits for this future in a place
        # where it cannot be raised. The optimizer's hook and the commit raise it.
        if error is not None:
            state.failure = error
            reduced.set_result(gradients[:count])
            return
        reduced.set_result(state.take(gradients, count))

    pending.start(work, done)
    return reduced
