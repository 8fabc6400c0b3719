"""NCCL's collectives, each as an exchange on gloo and a function that writes the outputs.

``opts`` are c10d's options. A backend returns a work, or None if the caller must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from kit.device_stream import land, land_all, stream

# Because of overloads in torch's stubs, which lack "Work | None".
# mypy: disable-error-code="override,assignment"


_wait_in_torch = dist.Work.wait  # before elastic/groups/pending.py replaces it
Started: TypeAlias = dist.Work | None
# Begins a collective on the gloo group; returns its work, and a function that writes the outputs.
Exchange = Callable[[Any], tuple[Any, Callable[[], None]]]


@dataclass(frozen=True)
class CoalescedPart:
    """One part of a coalesced operation."""

    outputs: Sequence[torch.Tensor]
    exchange: Exchange
    garbage: Callable[[], None]


class Operations(dist.ProcessGroup):
    """The operations that c10d calls. Subclasses queue them."""

    _coalesced: list[CoalescedPart] | None = None

    def _queue(
        self,
        outputs: Sequence[torch.Tensor],
        exchange: Exchange,
        garbage: Callable[[], None] = lambda: None,
        *,
        is_barrier: bool = False,
        is_async: bool = True,
        is_collective: bool = True,
        is_coalesced: bool = False,
    ) -> Started:
        raise NotImplementedError

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Started:
        (tensor,) = tensors
        staged = tensor.detach().clone()
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        own = staged.clone()
        return self._queue(
            [tensor],
            lambda gloo: (gloo.allreduce([staged], options), lambda: land(tensor, staged)),
            # An aborted ring leaves partial sums of some chunks.
            lambda: land(tensor, own),
            is_async=_is_async(opts),
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Started:
        return self._fast_path(opts, lambda each: [self.allreduce([t], each) for t in tensors])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Started:
        (tensor,) = tensors
        staged = tensor.detach().clone()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = opts.rootRank, 0
        is_root = (
            opts.rootRank == self.rank()
        )  # ncclBroadcast in place: the root's tensor is not written
        return self._queue(
            [] if is_root else [tensor],
            lambda gloo: (
                gloo.broadcast([staged], options),
                lambda: None if is_root else land(tensor, staged),
            ),
            is_async=_is_async(opts),
        )

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Started:
        """ncclReduce writes only to the root's output; gloo's writes to every rank's."""
        (tensor,) = tensors
        staged = tensor.detach().clone()
        options = dist.ReduceOptions()
        options.rootRank, options.rootTensor = opts.rootRank, 0
        options.reduceOp = opts.reduceOp
        is_root = opts.rootRank == self.rank()
        own = staged.clone()
        return self._queue(
            [tensor] if is_root else [],
            lambda gloo: (
                gloo.reduce([staged], options),
                lambda: land(tensor, staged) if is_root else None,
            ),
            lambda: land(tensor, own) if is_root else None,
            is_async=_is_async(opts),
        )

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Started:
        (gathered,), (mine,) = outputs, inputs
        sent = mine.detach().clone()
        staged = [torch.empty_like(t) for t in gathered]
        return self._queue(
            gathered,
            lambda gloo: (gloo.allgather([staged], [sent]), lambda: land_all(gathered, staged)),
            is_async=_is_async(opts),
            # ProcessGroupNCCL.cpp, ``allgather``: uneven parts become coalesced broadcasts.
            is_coalesced=len({part.shape for part in gathered}) > 1,
        )

    def _allgather_base(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> Started:
        parts = list(output.reshape(self.size(), *mine.shape).unbind(0))
        return self.allgather([parts], [mine], opts)

    all_gather_single = _allgather_base  # its name since torch 2.13

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        pairs = list(zip(outputs, inputs, strict=True))
        return self._fast_path(
            opts, lambda each: [self._allgather_base(out, mine, each) for out, mine in pairs]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Started:
        """ProcessGroupNCCL.cpp, ``gather``: sends and receives in one group."""
        (mine,) = inputs
        gathered = outputs[0] if outputs else []
        sent = mine.detach().clone()
        staged = [torch.empty_like(t) for t in gathered]
        options = dist.GatherOptions()
        options.rootRank = opts.rootRank
        return self._queue(
            gathered,
            lambda gloo: (
                gloo.gather([staged] if staged else [], [sent], options),
                lambda: land_all(gathered, staged),
            ),
            is_async=_is_async(opts),
        )

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> Started:
        (output,) = outputs
        staged = torch.empty_like(output)
        sent = [[t.detach().clone() for t in inputs[0]]] if inputs else []
        options = dist.ScatterOptions()
        options.rootRank = opts.rootRank
        return self._queue(
            [output],
            lambda gloo: (gloo.scatter([staged], sent, options), lambda: land(output, staged)),
            is_async=_is_async(opts),
        )

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Started:
        (output,), (given,) = outputs, inputs
        staged = torch.stack([t.detach().reshape(-1) for t in given])
        return self._reduce_scatter(output, staged, opts)

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Started:
        staged = given.detach().clone().reshape(self.size(), -1)
        return self._reduce_scatter(output, staged, opts)

    reduce_scatter_single = _reduce_scatter_base  # its name since torch 2.13

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        pairs = list(zip(outputs, inputs, strict=True))
        return self._fast_path(
            opts, lambda each: [self._reduce_scatter_base(out, mine, each) for out, mine in pairs]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: torch.Tensor, staged: torch.Tensor, opts: Any) -> Started:
        """gloo reduces all parts; only this rank's part is written."""
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        own = staged[self.rank()].clone()
        return self._queue(
            [output],
            lambda gloo: (
                gloo.allreduce([staged], options),
                lambda: land(output, staged[self.rank()].reshape(output.shape)),
            ),
            lambda: land(output, own.reshape(output.shape)),
            is_async=_is_async(opts),
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Started:
        """ProcessGroupNCCL.cpp, ``alltoall_base``: sends and receives in one group."""
        sent, staged = given.detach().clone(), torch.empty_like(output)
        options = dist.AllToAllOptions()
        return self._queue(
            [output],
            lambda gloo: (
                gloo.alltoall_base(staged, sent, output_sizes, input_sizes, options),
                lambda: land(output, staged),
            ),
            is_async=_is_async(opts),
        )

    all_to_all_single = alltoall_base  # its name since torch 2.13

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Started:
        sent = torch.cat([t.detach().reshape(-1) for t in inputs])
        sizes = [t.numel() for t in outputs]
        staged = torch.empty(sum(sizes), dtype=sent.dtype)
        given, options = [t.numel() for t in inputs], dist.AllToAllOptions()

        def land() -> None:
            parts = torch.split(staged, sizes)
            land_all(outputs, [p.reshape(o.shape) for p, o in zip(parts, outputs, strict=True)])

        return self._queue(
            outputs,
            lambda gloo: (gloo.alltoall_base(staged, sent, sizes, given, options), land),
            is_async=_is_async(opts),
        )

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> Started:
        """ProcessGroupNCCL.cpp, ``pointToPoint``: always returns a work. NCCL ignores tags; here
        they separate sends from collectives."""
        sent = [tensors[0].detach().clone()]
        return self._queue(
            [], lambda gloo: (gloo.send(sent, receiver, tag), lambda: None), is_collective=False
        )

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Started:
        (output,) = tensors
        staged = torch.empty_like(output)
        return self._queue(
            [output],
            lambda gloo: (gloo.recv([staged], source, tag), lambda: land(output, staged)),
            is_collective=False,
        )

    def barrier(self, opts: Any = None) -> Started:
        """ProcessGroupNCCL.cpp, ``barrier``: an all-reduce of one element. ``wait`` blocks the
        host. If ``asyncOp`` is false, the call itself waits for the stream and returns no work."""
        token = torch.zeros(1)
        work = self._queue(
            [],
            lambda gloo: (gloo.allreduce([token]), lambda: None),
            is_barrier=True,
            is_async=_is_async(opts),
        )
        if work is None:
            stream.run_up()
        return work

    def _fast_path(self, opts: Any, begin: Callable[[Any], object]) -> Started:
        """ProcessGroupNCCL.cpp, ``collectiveCoalesced``."""
        self._coalesced = []
        begin(opts)
        parts, self._coalesced = self._coalesced, None
        return self._queue_all(parts, is_async=_is_async(opts))

    def _queue_all(
        self, parts: list[CoalescedPart], *, is_async: bool, is_coalesced: bool = False
    ) -> Started:
        def exchange(gloo: Any) -> tuple[Any, Callable[[], None]]:
            begun = [part.exchange(gloo) for part in parts]
            return _Works([work for work, _ in begun]), lambda: _call_all(land for _, land in begun)

        return self._queue(
            [output for part in parts for output in part.outputs],
            exchange,
            lambda: _call_all(part.garbage for part in parts),
            is_async=is_async,
            is_coalesced=is_coalesced,
        )


class _Works:
    """The gloo works of a coalesced operation, as one work."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            wait_for_gloo(work)


def wait_for_gloo(work: Any) -> None:
    """Raise the error of a work that has ended, if any."""
    if isinstance(work, dist.Work):
        _wait_in_torch(work)
    else:
        work.wait()


def _is_async(options: Any) -> bool:
    """Whether a call is asynchronous, as are C++ calls without options (Types.hpp, ``asyncOp``)."""
    return options is None or bool(options.asyncOp)


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()
