"""Gradients of uneven shares: every rank's are weighted by its samples, then summed.

A rank that holds n of the N samples of a step has the gradient of the mean over its n. The mean
over all N is the sum over ranks of n/N times that, for any split, down to a rank with nothing.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.
import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from elastic.clock import SYSTEM_CLOCK
from elastic.training.words import Room, Words
from elastic.worker.pending import pending

WAIT_SLICE_S = 20e-6


class Reduction:
    """The communication hook's state: this rank's weight, and whether gradients were reduced."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.is_done = False
        self.failure: BaseException | None = None  # also if the script swallowed it
        self.works: list[dist.Work] = []  # of this step, on devices that run ahead of the host
        # On the CPU: what DDP waits for, and what will be in it.
        self.sent: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self.is_static = False  # DDP reduces at the end of the first backward pass, and waits there
        self.words: Words | None = None  # what ranks tell each other with the first bucket
        self.group: dist.ProcessGroup | None = None  # of the present world
        self._room: Room | None = None  # in the first bucket

    def leave(self) -> None:
        """Hold nothing of the world that is over."""
        self.group = self._room = None
        self.is_static = False
        self.works.clear()
        self.sent.clear()
        if self.words is not None:
            self.words.forget()

    def begin(self, weight: float) -> None:
        """A new step, in which this rank holds the part ``weight`` of the global batch."""
        self.weight = weight
        self.is_done = False
        self.failure = None
        self.works.clear()
        self.sent.clear()

    def weigh(self, gradients: torch.Tensor) -> None:
        """Multiply a bucket's gradients with this rank's weight."""
        if self.weight == 0.0:
            gradients.zero_()  # × 0 would keep a NaN of the sample that only filled a gap
        elif self.weight != 1.0:
            gradients.mul_(self.weight)

    def with_words(self, gradients: torch.Tensor) -> torch.Tensor:
        """The gradients of the first bucket, and behind them what this rank says."""
        if self.words is None:
            return gradients
        room = self._room
        if room is None or not room.is_behind(gradients):
            room = self._room = Room.behind(gradients)
        if room is None:
            return gradients
        self.words.write(room.end)
        return room.both

    def receive(self) -> None:
        """Give DDP what it waits for, at the end of a backward pass on the CPU.

        What went wrong is not given to it as an exception: the autograd engine waits in a place
        where that cannot be raised. The optimizer's hook and the commit raise it.
        """
        try:
            pending.finish()
        except Exception as error:  # noqa: BLE001  raised by whoever asks next, see above
            self.failure = error.with_traceback(None)  # its frames hold the group
        for reduced, gradients in self.sent:
            reduced.set_result(gradients)
        self.sent.clear()

    def failed(self, error: BaseException) -> None:
        """Another collective of this step than those of the gradients came to nothing."""
        self.failure = error

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


def weighted_sum(state: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: scale this rank's bucket by its weight and add all ranks' up."""
    gradients, group = bucket.buffer(), state.group
    assert group is not None
    state.weigh(gradients)
    state.is_done = True
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if group.size() == 1:
        reduced.set_result(gradients)
        return reduced
    sent = state.with_words(gradients) if bucket.index() == 0 else gradients
    if gradients.device.type != "cpu":
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None  # None only on ranks outside the group
        state.works.append(work)
        on_device: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda future: _without_words(future.value()[0], gradients.numel())
        )
        return on_device
    pending.begin(group.allreduce(sent))
    state.sent.append((reduced, gradients))
    if bucket.is_last():
        is_in_pass = torch._C._current_graph_task_id() != -1  # DDP.join() calls this outside
        if state.is_static or not is_in_pass:
            state.receive()
        else:
            Variable._execution_engine.queue_callback(state.receive)
    return reduced


def _without_words(summed: torch.Tensor, count: int) -> torch.Tensor:
    return summed if summed.numel() == count else summed[:count]
