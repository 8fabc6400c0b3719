"""Collectives of small values and tensors, and the process group of DDP's reducer."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist

from elastic import torch_private
from elastic.groups import pending
from elastic.groups.pending import HOST, PendingWorks, Semantics, pending_works, semantics_of
from elastic.torch_private import not_compiled
from elastic.tuning.intervals import collective_of_environment

# ----------------------------------------------------------------------------
# Collectives for small JSON values and for tensors: torch's collectives for objects use pickle.
#
# They span the world: they use torch's default group, or, if that is a replica's
# (:mod:`elastic.groups.replica`), the group passed to :func:`use_as_world`.

# Latency dominates the cost of a short collective: some milliseconds on a busy machine. Data that
# fits into these sizes is sent together with its length.
_LENGTH_BYTES = 8
_BROADCAST_BYTES = 8192 - _LENGTH_BYTES
_GATHERED_BYTES = 1024 - _LENGTH_BYTES  # from each rank
_CPU = torch.device("cpu")
_NO_LIMIT = datetime.timedelta(days=365)

Started: TypeAlias = dist.Work | None
"""A collective; None on ranks that are not in its group."""


class RankGroup(Protocol):
    """Ranks that communicate. Rank numbers are those within the group."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def works(self) -> PendingWorks: ...
    def semantics(self, device: torch.device) -> Semantics:
        """The semantics of its collectives on tensors of that device."""
        ...

    def wire(self, device: torch.device) -> torch.device:
        """The device on which it communicates tensors that are on ``device``."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work | None: ...
    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work | None: ...
    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> dist.Work | None: ...
    def send_parts(
        self, tensor: torch.Tensor, parts: Mapping[int, int], receiver: int
    ) -> dist.Work | None:
        """Move parts of a tensor to ``receiver``, all at once.

        ``parts``: how many elements each source sends, in rank order. ``tensor``: the whole tensor
        on the receiver, this rank's part on a source, any tensor of that type elsewhere.
        """

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of its later collectives."""


class _DefaultGroup:
    """torch's default group at the time of each call."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def works(self) -> PendingWorks:
        return pending_works()

    def semantics(self, device: torch.device) -> Semantics:
        return semantics_of(device.type)

    def wire(self, device: torch.device) -> torch.device:
        return device if device.type != "cpu" else _torchs_control_device()

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work | None:
        return cast(Started, dist.all_reduce(tensor, async_op=True))

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work | None:
        return cast(Started, dist.broadcast(tensor, source, async_op=True))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> dist.Work | None:
        return cast(Started, dist.all_gather(outputs, tensor, async_op=True))

    def send_parts(
        self, tensor: torch.Tensor, parts: Mapping[int, int], receiver: int
    ) -> dist.Work | None:
        out, into, received, sent = _one_way(tensor, parts, receiver, self.rank, self.size)
        work = dist.all_to_all_single(
            into, out, output_split_sizes=received, input_split_sizes=sent, async_op=True
        )
        return cast(Started, work)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        torch_private.set_group_timeout(timeout)


class OwnGroup:
    """A group that is not registered with torch: torch's groups and meshes do not depend on it.

    ``backend``: a c10d backend (ProcessGroupGloo, ProcessGroupNCCL) for tensors on ``device``.
    """

    def __init__(
        self,
        backend: Any,
        works: PendingWorks,
        *,
        semantics: Semantics = HOST,
        device: torch.device = _CPU,
    ) -> None:
        self.backend = backend
        self.works = works
        self.rank: int = backend.rank()
        self.size: int = backend.size()
        self.is_on_stream = semantics.is_on_stream
        self._semantics = semantics
        self._device = device

    def semantics(self, device: torch.device) -> Semantics:
        return self._semantics

    def wire(self, device: torch.device) -> torch.device:
        return self._device

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        work: dist.Work = self.backend.allreduce([tensor], dist.AllreduceOptions())
        return work

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        work: dist.Work = self.backend.broadcast([tensor], options)
        return work

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> dist.Work:
        work: dist.Work = self.backend.allgather([outputs], [tensor])
        return work

    def send_parts(
        self, tensor: torch.Tensor, parts: Mapping[int, int], receiver: int
    ) -> dist.Work:
        out, into, received, sent = _one_way(tensor, parts, receiver, self.rank, self.size)
        options = dist.AllToAllOptions()
        work: dist.Work = self.backend.alltoall_base(into, out, received, sent, options)
        return work

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        torch_private.set_backend_timeout(self.backend, timeout)


def _one_way(
    tensor: torch.Tensor, parts: Mapping[int, int], receiver: int, rank: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """The arguments of ``rank`` for an all-to-all that moves parts of a tensor to one rank only:
    the tensors to send and to receive into, and the sizes of the parts received and sent.

    Sends and receives would suffice, but an abort cannot release a thread that waits for them
    (:mod:`elastic.groups.pending`). A broadcast would send the tensor to ranks that have it.
    """
    none = tensor.new_empty(0)
    received, sent = [0] * size, [0] * size
    out = into = none
    if parts.get(rank):
        out, sent[receiver] = tensor, parts[rank]
    if rank == receiver:
        into, received = tensor, [parts.get(source, 0) for source in range(size)]
    return out, into, received, sent


_DEFAULT = _DefaultGroup()
_world: RankGroup = _DEFAULT
_peers: RankGroup = _DEFAULT


def world_group() -> RankGroup:
    """All ranks of the current world."""
    return _world


def peer_group() -> RankGroup:
    """The ranks with the same state: all, or those at the same position in each replica."""
    return _peers


def use_as_world(world: OwnGroup | None, peers: OwnGroup | None = None) -> None:
    """Set the group of the world, and the group of the ranks with this rank's state (by default
    the whole world). None as the world: torch's default group."""
    global _world, _peers
    _world = _DEFAULT if world is None else world
    _peers = _world if peers is None else peers


@contextmanager
def without_timeout() -> Iterator[None]:
    """Within the block, collectives wait for a rank for as long as it works.

    For work whose duration follows from the size of the state and the speed of a storage: hang
    detection distinguishes a rank that makes progress from one that does not, and a timeout cannot.
    After an exception the timeout stays as it is: the world is over.
    """
    groups = [_world] if _peers is _world else [_world, _peers]
    for group in groups:
        group.set_timeout(_NO_LIMIT)
    yield
    for group in groups:
        group.set_timeout(datetime.timedelta(seconds=collective_of_environment(os.environ)))


def control_device(group: RankGroup | None = None) -> torch.device:
    """The device for a group's small control tensors: the CPU if the group can communicate from
    there, else the GPU. ``group``: by default the world."""
    return (group or _world).wire(_CPU)


def _torchs_control_device() -> torch.device:
    backend = dist.get_backend_config()
    if "cpu" in str(backend) or dist.get_backend() == "gloo":
        return _CPU
    return torch.device("cuda", torch.cuda.current_device())


def complete(work: dist.Work | None, device: torch.device, group: RankGroup | None = None) -> None:
    """Return when the host can read the results of a collective on ``device``.

    ``group``: the collective's group, by default the world. Raises the collective's error, or
    GroupAborted.
    """
    group = group or _world
    semantics, works = group.semantics(device), group.works
    if not semantics.is_on_stream:
        works.wait(work)
        semantics.synchronize(device)
        return
    mark = works.mark()
    works.finish_on_stream(work)
    semantics.synchronize(device)
    works.raise_if_aborted()
    works.covered(mark)


def broadcast_json(value: Any, source: int = 0, group: RankGroup | None = None) -> Any:
    """Broadcast the JSON value of ``source`` to every rank; other ranks may pass anything.

    ``group``: by default the world, here and below.
    """
    group = group or _world
    if group.size == 1:
        return value
    is_source = group.rank == source
    received = broadcast_bytes(json.dumps(value).encode() if is_source else b"", source, group)
    return value if is_source else json.loads(received)


def broadcast_bytes(data: bytes, source: int, group: RankGroup) -> bytes:
    """Return the data of ``source`` on every rank: one broadcast if it is short, else two."""
    device = control_device(group)
    first = _frame(data, _BROADCAST_BYTES, device)
    complete(group.broadcast(first, source), device, group)
    size, received = _unframed(first)
    if size <= _BROADCAST_BYTES:
        return received
    rest = _bytes_tensor(data[_BROADCAST_BYTES:], size - _BROADCAST_BYTES, device)
    complete(group.broadcast(rest, source), device, group)
    return received + _bytes_of(rest)


def all_gather_json(value: Any, group: RankGroup | None = None) -> list[Any]:
    """Every rank's JSON value, in rank order: one collective if all are short, else two."""
    group = group or _world
    if group.size == 1:
        return [value]
    device = control_device(group)
    data = json.dumps(value).encode()
    framed = _all_gather(_frame(data, _GATHERED_BYTES, device), group)
    received = [_unframed(first) for first in framed]
    longest = max(size for size, _ in received)
    if longest <= _GATHERED_BYTES:
        return [json.loads(text) for _, text in received]
    buffers = _all_gather(_bytes_tensor(data, longest, device), group)
    return [
        json.loads(_bytes_of(buffer[:size]))
        for buffer, (size, _) in zip(buffers, received, strict=True)
    ]


def _all_gather(mine: torch.Tensor, group: RankGroup) -> list[torch.Tensor]:
    outputs = [torch.empty_like(mine) for _ in range(group.size)]
    complete(group.all_gather(outputs, mine), mine.device, group)
    return outputs


def _frame(data: bytes, room: int, device: torch.device) -> torch.Tensor:
    """The length of ``data``, and as much of it as there is room for."""
    length = len(data).to_bytes(_LENGTH_BYTES, "little")
    return _bytes_tensor(length + data[:room], _LENGTH_BYTES + room, device)


def _unframed(frame: torch.Tensor) -> tuple[int, bytes]:
    """The length of the data, and the part of it in this frame."""
    raw = _bytes_of(frame)
    size = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return size, raw[_LENGTH_BYTES : _LENGTH_BYTES + size]


def all_sum(values: Sequence[float]) -> list[float]:
    """The sum of each value over all ranks, in double precision."""
    device = control_device()
    total = torch.tensor(list(values), dtype=torch.float64, device=device)
    if _world.size > 1:
        complete(_world.all_reduce(total), device)
    return [float(v) for v in total.tolist()]


def broadcast_tensors(
    tensors: Mapping[str, torch.Tensor], source: int = 0, group: RankGroup | None = None
) -> None:
    """Overwrite every rank's tensors with those of ``source``; same names and shapes everywhere."""
    group = group or _world
    if group.size == 1:
        return
    with torch.no_grad():
        for name in sorted(tensors):
            tensor = tensors[name].detach()
            if not tensor.numel():  # an empty part of an uneven split
                continue
            moved = tensor.contiguous().to(group.wire(tensor.device))
            complete(group.broadcast(moved, source), moved.device, group)
            if moved.data_ptr() != tensor.data_ptr():
                tensor.copy_(moved)


def _bytes_tensor(data: bytes, size: int, device: torch.device) -> torch.Tensor:
    padded = bytearray(data.ljust(max(size, 1), b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8)[:size].to(device)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy())


# ----------------------------------------------------------------------------
# The process group for DDP's reducer: an abort also ends the reducer's waits.
#
# The reducer sums its buckets, rebuilds them in the second step of each world from a plan that
# rank 0 broadcasts, and with ``find_unused_parameters=True`` sums in every step which parameters
# were used. It would wait for all of these inside gloo, where an abort may not reach it (see
# :mod:`elastic.groups.pending`). This group intercepts its calls, and waits for them
# itself.

AllReduce = Callable[[torch.Tensor, dist.AllreduceOptions], dist.Work]


class ReleasableGroup(dist.ProcessGroup):
    """Forwards the reducer's calls to ``group``, except that ``all_reduce`` computes the sums.

    The reducer waits for sums where nothing can be raised: they must have ended by then. On a
    stream it does not wait, but the host reads the plan for its buckets at once, and an aborted
    broadcast leaves an invalid plan. ``before_plan`` is called before each broadcast of one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        all_reduce: AllReduce,
        *,
        is_on_stream: bool,
        before_plan: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._all_reduce = all_reduce
        self._before_plan = before_plan
        works = pending_works()
        self._finish = works.finish_on_stream if is_on_stream else works.finish_one

    def replace(self, reducer: Any) -> None:
        """Make the reducer use this group from now on. It does not keep this group alive."""
        pending.replace_reducer_group(reducer, self)

    @not_compiled
    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        return self._all_reduce(tensor, opts)

    @not_compiled
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        self._before_plan()
        return _Broadcast(self._group.broadcast(tensors, opts), self._finish)


class _Broadcast(dist.Work):
    """The reducer waits for it at once. A failure is raised there: otherwise the reducer would use
    an invalid plan."""

    def __init__(self, work: dist.Work, finish: Callable[[dist.Work], None]) -> None:
        super().__init__()
        self._work = work
        self._finish = finish

    @not_compiled
    def wait(self, timeout: object = None) -> bool:
        self._finish(self._work)
        return True
