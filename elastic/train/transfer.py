"""The transfer of a state from a rank that has it to the ranks of a new world."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import xxhash

from checkpoints import Ancestor
from elastic.errors import SYSTEM_CLOCK, CheckpointRequired, TrainingError
from elastic.groups.collectives import (
    RankGroup,
    all_gather_json,
    broadcast_bytes,
    broadcast_json,
    complete,
    control_device,
    peer_group,
    world_group,
)
from elastic.groups.world import World, joins_running_job
from elastic.telemetry.events import StateReceived, StateSent, WorldJoined
from elastic.telemetry.journal import EventSink
from elastic.train.checkpointing import CheckpointManager
from elastic.train.local import position_of
from elastic.train.progress import Agreement, RankProgress, Tag, agree, tag_of
from elastic.train.shards import (
    IN_PLACE_BYTES,
    Reserve,
    Spec,
    identical_names,
    new_memory,
    on_all_ranks,
    own_memory,
    pack,
    spec_of,
    unpack,
    warm_up,
)
from elastic.train.state import JobState

# ----------------------------------------------------------------------------
# Transfers state from all ranks that have it to ranks that lack it: JSON and raw bytes, no pickle.
#
# All sources send their parts of each large tensor that is identical on them, at the same time;
# the first source sends everything else. By default, data is received into spare memory: the
# receiver is unchanged until everything has arrived with a correct hash, so a source that dies
# during a transfer has no effect on receivers. A receiver that has nothing to lose can provide
# memory (``Room``), which saves a copy, and on a device the memory for it.

# A state is sent in at least a few chunks, so that some are transferred while another is hashed and
# copied. Chunks are small, so that those under way need little memory.
CHUNKS, SHORTEST_CHUNK_BYTES, LONGEST_CHUNK_BYTES = 8, 1 << 20, 32 << 20
# gloo runs two collectives at a time; the third is ready when one of them ends.
CHUNKS_UNDER_WAY = 3
_HASH_BITS = 63  # what fits into an int64 tensor

Tensors = dict[str, torch.Tensor]
Specs: TypeAlias = Mapping[str, Spec]
Room: TypeAlias = Callable[[Any, Specs], Tensors]
"""Called on a receiver with the source's JSON value and specs, before anything is sent. Returns
tensors to receive into, which hold garbage until :func:`transfer` has returned. Must not raise:
other ranks are in the transfer."""


def broadcast_blob(
    node: Any, tensors: Mapping[str, torch.Tensor], source: int, group: RankGroup | None = None
) -> tuple[Any, Tensors]:
    """Broadcast the JSON value and the small tensors of ``source`` to every rank, on the CPU.

    Other ranks may pass anything. For non-parameter state: everything is sent as one buffer.
    ``group``: by default the world, here and below; ranks are numbered within it.
    """
    group = group or world_group()
    if group.size == 1:
        return node, dict(tensors)
    is_source = group.rank == source
    data = _blob(node, tensors) if is_source else b""
    received = broadcast_bytes(data, source, group)
    if is_source:
        return node, dict(tensors)
    return _parse_blob(torch.frombuffer(bytearray(received), dtype=torch.uint8))


def gather(state: Any, job: JobState) -> list[Any]:
    """The state of each rank of the world, in their order. Every rank must call it."""
    group = world_group()
    packed, tensors = pack(state)
    gathered = []
    for rank in range(group.size):
        theirs, received = broadcast_blob(packed, tensors, rank, group)
        kept = {n: t.detach().cpu().clone() for n, t in received.items()}
        gathered.append(unpack(theirs, kept, job))
    return gathered


def _blob(node: Any, tensors: Mapping[str, torch.Tensor]) -> bytes:
    kept = {name: _bytes(tensor) for name, tensor in tensors.items()}
    head = json.dumps({"node": node, "specs": specs_of(tensors)}).encode()
    parts = [len(head).to_bytes(8, "little"), head]
    return b"".join([*parts, *(bytes(flat.cpu().numpy()) for flat in kept.values())])


def _parse_blob(buffer: torch.Tensor) -> tuple[Any, Tensors]:
    length = int.from_bytes(bytes(buffer[:8].tolist()), "little")
    head = json.loads(bytes(buffer[8 : 8 + length].numpy()))
    at, tensors = 8 + length, {}
    for name, spec in head["specs"].items():
        spare = new_memory(spec, torch.device("cpu"))
        flat = _bytes(spare)
        flat.copy_(buffer[at : at + flat.numel()])
        at += flat.numel()
        tensors[name] = spare
    return head["node"], tensors


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """Name to ``[dtype, shape, device type]``, for the receiver's buffers."""
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Transferred:
    """The result of a transfer, on one rank."""

    sources: tuple[int, ...]  # the first one, and all that have sent a part
    sent_bytes: int = 0  # by this rank
    node: Any = None  # on a receiver: the first source's JSON value
    tensors: Tensors | None = None  # on a receiver: the sources' tensors


def transfer(
    node: Any,
    tensors: Mapping[str, torch.Tensor],
    *,
    sources: Sequence[int],
    receivers: Sequence[int],
    device: torch.device,
    group: RankGroup | None = None,
    room: Room | None = None,
    identical: Collection[str] = (),
) -> Transferred:
    """Send the JSON value and the tensors of the first of ``sources`` to each of ``receivers``:
    into tensors of ``room`` with the source's specs, else into spare memory.

    ``identical``: on the first source, the names of tensors that are the same on all sources; each
    source sends a part of them. Every rank of the group calls it and takes part in the collectives;
    ranks that neither send nor receive keep nothing. Raises TrainingError if a hash is wrong.
    """
    group = group or world_group()
    rank, first = group.rank, sources[0]
    specs = specs_of(tensors)
    plan = broadcast_json(
        {"node": node, "specs": specs, "identical": sorted(identical)} if rank == first else None,
        first,
        group,
    )
    wire = group.wire(device)
    is_on_host = wire.type == "cpu" and not group.semantics(wire).is_on_stream
    route = TransferRoute.choose(sources, receivers, is_on_host=is_on_host)
    if len(route.sources) > 1:  # only sources with tensors like the first one's send parts
        has_them = all(specs.get(name) == plan["specs"][name] for name in plan["identical"])
        route = route.of([s for s, fits in enumerate(all_gather_json(has_them, group)) if fits])
    kept: Tensors = {}
    if rank in route.sources:
        kept = {name: tensor.detach() for name, tensor in tensors.items()}
    elif rank in receivers:
        kept = _memory_for(plan, device, room)
    sizes = {name: _count_bytes(spec) for name, spec in plan["specs"].items()}
    flat = {name: _bytes(kept[name]) for name in sizes if name in kept}
    chunks = ChunkedTransfer(flat, sizes, plan["identical"], route, wire, group)
    check_hashes(chunks.run(), route, group)
    if rank in receivers:
        return Transferred(route.sources, 0, plan["node"], kept)
    return Transferred(route.sources, chunks.sent_bytes)


@dataclass(frozen=True)
class TransferRoute:
    """Who sends to whom."""

    first: int  # sends all tensors that are not identical on the sources
    sources: tuple[int, ...]  # in order, including the first one
    receivers: tuple[int, ...]
    # Sources send everything to each receiver; otherwise the first source broadcasts, and
    # receivers forward it.
    is_direct: bool

    @staticmethod
    def choose(
        sources: Sequence[int], receivers: Sequence[int], *, is_on_host: bool
    ) -> TransferRoute:
        """The route on which the busiest source sends least.

        In a broadcast to N ranks, the source sends everything log2(N) times (gloo, broadcast.cc),
        also to ranks that have it. On a direct route, the sources together send it once to each
        receiver. On a stream the route is a broadcast.
        """
        size = len(sources) + len(receivers)
        is_direct = is_on_host and len(receivers) <= len(sources) * (size - 1).bit_length()
        taking_part = tuple(sorted(sources)) if is_direct else (sources[0],)
        return TransferRoute(sources[0], taking_part, tuple(receivers), is_direct)

    def of(self, fitting: Collection[int]) -> TransferRoute:
        """The same route with only the first and these sources."""
        sources = tuple(s for s in self.sources if s == self.first or s in fitting)
        return TransferRoute(self.first, sources, self.receivers, self.is_direct)

    @property
    def targets(self) -> tuple[int | None, ...]:
        """The ranks that each chunk is sent to, in order; None: all at once."""
        return self.receivers if self.is_direct else (None,)

    def parts(self, size: int, *, is_divided: bool) -> dict[int, slice]:
        """The slice of ``size`` bytes that each source sends, in the order of ranks."""
        senders = self.sources if is_divided else (self.first,)
        cuts = [size * n // len(senders) for n in range(len(senders) + 1)]
        return {s: slice(*cuts[n : n + 2]) for n, s in enumerate(senders)}


Piece = tuple[str, int, int]
"""The name of a tensor, and the ``start`` and ``stop`` of some of its bytes."""


def _chunks(sizes: Mapping[str, int], longest: int) -> Iterator[list[Piece]]:
    """Divide the bytes of all tensors: small tensors share a chunk, and none exceeds ``longest``.

    A large tensor does not share chunks, so they can be sent from its memory.
    """
    pieces: list[Piece] = []
    room = longest
    for name, size in sizes.items():
        if size >= min(IN_PLACE_BYTES, longest):
            yield from ([(name, at, min(size, at + longest))] for at in range(0, size, longest))
            continue
        if size > room:
            yield pieces
            pieces, room = [], longest
        if size:
            pieces.append((name, 0, size))
            room -= size
    if pieces:
        yield pieces


class SentChunk(NamedTuple):
    """A chunk that is being sent."""

    pieces: list[Piece]
    parts: dict[int, slice]  # of its bytes, by sending rank
    memory: torch.Tensor  # of the chunk; on a source, of its part
    work: dist.Work | None
    target: int | None  # the receiving rank; None: all receivers


class ChunkedTransfer:
    """Transfers all chunks from the sources: some are under way while another is hashed and copied.

    ``flat`` holds the bytes of each tensor, to read or to fill; it is empty on a rank that is not
    involved. ``identical``: the tensors of which each source sends a part.
    """

    def __init__(
        self,
        flat: Tensors,
        sizes: Mapping[str, int],
        identical: Collection[str],
        route: TransferRoute,
        wire: torch.device,
        group: RankGroup,
    ) -> None:
        self.sent_bytes = 0  # by this rank
        self._group = group
        self._flat = flat
        self._sizes = sizes
        self._identical = frozenset(identical)
        self._route = route
        self._wire = wire
        self._semantics = group.semantics(wire)
        self._is_source = group.rank in route.sources
        self._digests = {source: xxhash.xxh3_64() for source in route.sources}

    def run(self) -> dict[int, int]:
        """Transfer all chunks. Returns a hash of the bytes by source: on a receiver those of all
        sources, on a source its own."""
        total = sum(self._sizes.values())
        longest = min(max(total // CHUNKS, SHORTEST_CHUNK_BYTES), LONGEST_CHUNK_BYTES)
        under_way: deque[SentChunk] = deque()
        spare: deque[torch.Tensor] = deque(
            torch.empty(min(longest, total), dtype=torch.uint8, device="cpu")
            for _ in range(CHUNKS_UNDER_WAY)
        )
        for pieces in _chunks(self._sizes, longest):
            for target in self._route.targets:
                if len(under_way) == CHUNKS_UNDER_WAY:
                    self.finish_chunk(under_way.popleft())
                under_way.append(self.send_chunk(pieces, target, spare[0]))
                spare.rotate()
        while under_way:
            self.finish_chunk(under_way.popleft())
        return {
            source: digest.intdigest() & (2**_HASH_BITS - 1)
            for source, digest in self._digests.items()
        }

    def send_chunk(
        self, pieces: list[Piece], target: int | None, buffer: torch.Tensor
    ) -> SentChunk:
        """Begin to send a chunk of these pieces: from the memory of their tensor into the
        receiver's tensor, or through ``buffer``."""
        size = sum(stop - start for _, start, stop in pieces)
        is_divided = len(pieces) == 1 and pieces[0][0] in self._identical
        parts = self._route.parts(size, is_divided=is_divided)
        chunk = self._in_place(pieces)
        if chunk is None:
            chunk = buffer[:size]
            if self._group.rank in parts:
                for place, (name, start, stop) in _places(pieces):
                    chunk[place] = self._flat[name][start:stop]
        if self._is_source:
            chunk = chunk[parts.get(self._group.rank, slice(0))]
            self.sent_bytes += chunk.numel()
        moved = chunk.to(self._wire)
        if target is None:
            work = self._group.broadcast(moved, self._route.first)
        else:
            lengths = {source: part.stop - part.start for source, part in parts.items()}
            work = self._group.send_parts(moved, lengths, target)
        if work is not None and not self._semantics.is_on_stream:
            self._group.works.begin(work)  # not waited for if an earlier chunk fails
        return SentChunk(pieces, parts, moved, work, target)

    def _in_place(self, pieces: list[Piece]) -> torch.Tensor | None:
        """The part of a tensor that equals the chunk, if it can be sent directly from memory."""
        name, start, stop = pieces[0]
        flat = self._flat.get(name)
        if len(pieces) > 1 or flat is None or {flat.device, self._wire} != {torch.device("cpu")}:
            return None
        return flat[start:stop]

    def finish_chunk(self, sent: SentChunk) -> None:
        """Wait for a chunk, hash it, and copy it to its destination on a receiver."""
        self._wait(sent.work)
        if self._is_source:
            if sent.target in (None, self._route.receivers[0]):  # the same for all receivers
                self._digests[self._group.rank].update(sent.memory.cpu().numpy().data)
            return
        if not self._flat or sent.target not in (None, self._group.rank):
            return
        chunk = sent.memory.cpu()
        for source, part in sent.parts.items():
            self._digests[source].update(chunk[part].numpy().data)
        if self._in_place(sent.pieces) is not None:
            return
        for place, (name, start, stop) in _places(sent.pieces):
            flat = self._flat[name]
            flat[start:stop] = chunk[place].to(flat.device)

    def _wait(self, work: dist.Work | None) -> None:
        if work is None or self._semantics.is_on_stream:
            complete(work, self._wire, self._group)
        else:
            self._group.works.finish_one(work)
            self._semantics.synchronize(self._wire)


def _places(pieces: list[Piece]) -> Iterator[tuple[slice, Piece]]:
    """The offset of each piece in its chunk."""
    at = 0
    for piece in pieces:
        _, start, stop = piece
        yield slice(at, at + stop - start), piece
        at += stop - start


def check_hashes(digests: Mapping[int, int], route: TransferRoute, group: RankGroup) -> None:
    """Compare the receivers' hashes with the sources' hashes."""
    device = control_device(group)
    own = torch.tensor([digests.get(group.rank, 0)], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(group.size)]
    complete(group.all_gather(gathered, own), device, group)
    if group.rank not in route.receivers:
        return
    for source in route.sources:
        sent = int(gathered[source].item())
        if sent != digests[source]:
            raise TrainingError(
                f"the state sent by rank {source} was corrupted in transfer (hash "
                f"{digests[source]:x}, expected {sent:x}), and is not used",
                hint="check for hardware errors on the network between the nodes",
            )


def _memory_for(plan: Mapping[str, Any], device: torch.device, room: Room | None) -> Tensors:
    specs: Specs = plan["specs"]
    own = room(plan["node"], specs) if room is not None else {}
    own_specs = specs_of(own)
    return {
        name: own[name].detach()
        if own_specs.get(name) == spec and _is_flat(own[name])
        else new_memory(spec, device)
        for name, spec in specs.items()
    }


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether :func:`_bytes` returns a view of the tensor."""
    return tensor.is_contiguous() and _bytes(tensor).data_ptr() == tensor.data_ptr()


def _count_bytes(spec: list[Any]) -> int:
    count: int = getattr(torch, spec[0]).itemsize
    for length in spec[1]:
        count *= length
    return count


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as flat bytes: a view where its memory is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1 and flat.stride(0) != 1:
        flat = flat.clone()
    return flat.view(torch.uint8)


# ----------------------------------------------------------------------------
# Gives all ranks of a new world the same state without a restart: agreement, then transfer.
#
# The main thread of every rank runs this between two steps of the job. A rank's state does not
# change before the received state is complete, so after a fault the next world retries from the
# same state. A rank without a state receives weights directly into its model; its state is torn,
# as in the middle of an update, until everything has arrived and is verified.


class Reconfiguration:
    """The reconfiguration of a rank. One per process."""

    def __init__(
        self,
        job: JobState,
        progress: RankProgress,
        checkpoints: CheckpointManager,
        journal: EventSink,
        device: torch.device,
    ) -> None:
        self._job = job
        self._progress = progress
        self._checkpoints = checkpoints
        self._journal = journal
        self._device = device
        self._reserve = Reserve()

    def prepare(self) -> None:
        """Allocate the memory of a state before this rank is ready for its first world.

        If it joins a running job, the other ranks train meanwhile; later they would wait for
        anything that is not done here.
        """
        if joins_running_job() and self._progress.tag is None and not self._job.is_rebuilt:
            self._reserve.fill(
                tracked
                for tracked in self._job.tracked.values()
                if isinstance(tracked, torch.optim.Optimizer)
            )
            warm_up(self._job)

    def enter(self, world: World, committed_step: int | None) -> World:
        """Give all ranks of the group the same state. Returns the world with the job's generation.

        Raises CheckpointRequired if no rank has a state, no checkpoint can be loaded, and the job
        has committed steps.
        """
        began_s = SYSTEM_CLOCK.monotonic()
        agreement = agree(self._progress.rank_state(world.nonce), world.mesh.size)
        self._progress.agreed_on_calls(agreement)
        try:
            if agreement.is_fresh:
                if self._job.is_sharded:
                    committed_step = self._not_to_lose(committed_step)
                world = self._start_fresh(world, committed_step, may_begin=not agreement.is_torn)
            else:
                world = self._continue(world, agreement)
        finally:
            self._reserve.clear()
        self._joined(world, agreement.source, agreement.tag, began_s)
        return world

    def agree_to_build(self, world: World) -> World:
        """Verify that all ranks of the group are in one world, and that none has a state:
        :meth:`restore` loads the state once its objects are built."""
        agreement = agree(self._progress.rank_state(world.nonce))
        self._progress.agreed_on_calls(agreement)
        if not agreement.is_fresh:
            raise TrainingError(
                f"rank {agreement.source} has a complete model, but this rank builds a sharded "
                "model in each world",
                hint="run the same script on every rank: call run.build on all ranks or on none",
            )
        return world

    def restore(self, world: World, committed_step: int | None) -> World:
        """Load the state of the objects built in ``world``. Returns the world with the job's
        generation.

        Without a checkpoint, the job starts over if it loses no more steps than lie between two
        saves to memory. Raises CheckpointRequired if it would lose more.
        """
        began_s = SYSTEM_CLOCK.monotonic()
        world = self._start_fresh(world, self._not_to_lose(committed_step), may_begin=True)
        self._joined(world, None, None, began_s)
        return world

    def _not_to_lose(self, committed_step: int | None) -> int | None:
        """The progress without which the job must not start over; None for fewer steps than lie
        between two saves to memory."""
        may_lose = self._checkpoints.first_memory_step
        is_short = may_lose is not None and (committed_step or 0) <= may_lose + 1
        return None if is_short else committed_step

    def _joined(self, world: World, source: int | None, tag: Tag | None, began_s: float) -> None:
        all_gather_json(True)  # no rank continues before all ranks have received everything
        job = self._job
        if tag is None:
            tag = tag_of(0, job.progress)
        self._progress.agreed(tag, generation=world.generation)
        self._journal.emit(
            WorldJoined(
                generation=world.generation,
                rank=world.rank,
                size=world.size,
                step=job.progress.step,
                source=source,
                duration_s=round(SYSTEM_CLOCK.monotonic() - began_s, 4),
            ),
            level=logging.DEBUG,
        )

    def _start_fresh(self, world: World, committed_step: int | None, *, may_begin: bool) -> World:
        generation = self._checkpoints.restore(world, self._job, may_begin=may_begin)
        self._job.local_state.adopt(position_of(vars(self._job.progress)))
        step = self._job.progress.step
        if committed_step and step == 0 and not self._checkpoints.is_resumed:
            raise CheckpointRequired(
                f"the job had committed {committed_step} steps, but no remaining rank has them, "
                "and there is no checkpoint to resume from",
                hint="pass elastic.join(checkpoints=…) a folder that all nodes share; to start "
                "from step 0 again, use another --rdzv-id",
            )
        return dataclasses.replace(world, generation=generation)

    def _continue(self, world: World, agreement: Agreement) -> World:
        source, tag = agreement.holders[0], agreement.tag
        assert tag is not None
        is_source = world.replica == source
        node, tensors = (
            on_all_ranks(world, self._pack_non_parameters)
            if is_source
            else (on_all_ranks(world, lambda: None) or (None, {}))
        )
        node, tensors = broadcast_blob(node, tensors, source, peer_group())
        if agreement.receivers:
            self._transfer(world, agreement)
        state = unpack(node, tensors, self._job)
        self._progress.rollback.adopt(state["small"])
        if not is_source:
            self._progress.tag = tag  # equal weights: from here on, a fault loses nothing
        generation = max(world.generation, state["generation"] + 1)
        lineage = tuple(Ancestor(*pair) for pair in state["lineage"])
        step = self._job.progress.step
        self._checkpoints.inherit(
            (*lineage, Ancestor(generation, step)), generation, state["saved_step"]
        )
        return dataclasses.replace(world, generation=generation)

    def _pack_non_parameters(self) -> tuple[Any, dict[str, torch.Tensor]]:
        rollback = self._progress.rollback
        lineage, generation, saved_step = self._checkpoints.origin
        return pack(
            {
                "small": rollback.snapshot,
                "lineage": [[a.generation, a.began_at_step] for a in lineage],
                "generation": generation,
                "saved_step": saved_step,
            }
        )

    def _room(self, tag: Tag) -> Room:
        """Receive into the memory of this rank's model, unless another rank may need its weights,
        and into the reserve."""

        def room(packed: Any, specs: Specs) -> dict[str, torch.Tensor]:
            own: dict[str, torch.Tensor] = {}
            if self._progress.can_spare_weights(tag):
                own = own_memory(packed, specs, self._job)
            if own:
                self._progress.begin_taking_over()
            others = {name: spec for name, spec in specs.items() if name not in own}
            return own | self._reserve.take(others)

        return room

    def _transfer(self, world: World, agreement: Agreement) -> None:
        tag = agreement.tag
        assert tag is not None
        began_s = SYSTEM_CLOCK.monotonic()
        size, position = world.mesh.size, world.rank_in_replica
        # Each position in the replicas has a separate transfer, from all replicas that have the
        # state; the first source differs between positions.
        turn = position % len(agreement.holders)
        holders = (*agreement.holders[turn:], *agreement.holders[:turn])
        packed = on_all_ranks(
            world,
            lambda: pack(self._job.tree()) if world.replica in holders else (None, {}),
        )
        node, tensors = packed
        moved = transfer(
            node,
            tensors,
            sources=holders,
            receivers=sorted({rank // size for rank in agreement.receivers}),
            device=self._device,
            group=peer_group(),
            room=self._room(tag),
            identical=identical_names(tensors, self._job),
        )
        sources = tuple(replica * size + position for replica in moved.sources)

        def take_over() -> None:
            if moved.tensors is None:
                return
            tree = unpack(moved.node, moved.tensors, self._job)
            self._job.check(tree, f"the state of rank {holders[0] * size + position}")
            self._progress.begin_taking_over()
            self._job.apply(tree)
            self._progress.took_over(tag)

        on_all_ranks(world, take_over, is_loss=True)
        took_s = round(SYSTEM_CLOCK.monotonic() - began_s, 4)
        if moved.tensors is not None:
            self._journal.emit(
                StateReceived(
                    source=holders[0] * size + position,
                    sources=sources,
                    step=tag.step,
                    bytes=sum(t.nbytes for t in moved.tensors.values()),
                    duration_s=took_s,
                )
            )
        elif world.rank in sources:
            self._journal.emit(
                StateSent(
                    receivers=tuple(r for r in agreement.receivers if r % size == position),
                    step=tag.step,
                    bytes=moved.sent_bytes,
                    duration_s=took_s,
                ),
                level=logging.DEBUG,
            )
