"""Plans a save: what one rank copies of a state, and how the copy is named and written.

Training waits only for the copy. To flatten a state of 100,000 tensors, to name them and to copy
them one by one takes 2.5 s, twenty times a loop that only copies. So training reads the state by
operations that each handle all tensors at once, and copies small tensors of one type and shape by
one call for a run of them: together less than that loop. The writer thread derives names, tree and
pieces from what was read, for the first save of a structure. Between two saves of one structure,
only the values change.

A state with tensors of other kinds, such as DTensors, is flattened item by item before it is
copied. All ranks divide a state alike, whichever way they plan it: in the order of its leaves, by
level.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from checkpoints.errors import StateError
from checkpoints.manifest import SpecTable, digest
from checkpoints.tensors import (
    BY_NAME,
    Extent,
    Region,
    Shape,
    Span,
    TensorSpec,
    by_dtype,
    chunks_of,
    copy_to,
    element_at,
    file_order,
    share_of,
)
from checkpoints.tree import (
    MAX_DEPTH,
    Node,
    Types,
    escaped,
    flatten,
    has_plain_bytes,
    has_plain_keys,
    memory_identity,
    spec_of,
    unused_name,
    value_node,
)
from checkpoints.values import PLAIN, plain_form, plain_item

_SMALL_BYTES = 64 << 10  # larger tensors are copied one by one: their copy is what takes the time
# The number of small tensors that are copied by one call. Not more, so that the views of them do
# not make the garbage collector visit all objects of the process.
_RUN_PIECES = 256
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_CONTAINERS = frozenset((dict, list, tuple))
_EXACT = _TENSORS | PLAIN | _CONTAINERS

Pieces = Iterable[tuple[TensorSpec, Extent]]
"""What a rank writes, in the order of its file. Can be read several times."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Pieces that follow each other in the file: the same elements of tensors of one type and
    shape."""

    tensors: Sequence[int]  # their positions in the state
    dtype: str
    shape: Shape
    place: Extent
    begin: int  # in the body of the file
    devices: frozenset[torch.device]

    @property
    def piece_bytes(self) -> int:
        return self.place.count * BY_NAME[self.dtype].size_bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.tensors) * self.piece_bytes

    @property
    def is_small(self) -> bool:
        """Whether the pieces are complete small tensors."""
        is_complete = self.place == Span(0, math.prod(self.shape))
        return is_complete and 0 < self.piece_bytes <= _SMALL_BYTES

    def copy(self, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Copy the pieces of these tensors into ``memory``, the body of the file."""
        size, together = self.piece_bytes, _RUN_PIECES if self.is_small else 1
        if not size:
            return
        for first in range(0, len(self.tensors), together):
            chosen = self.tensors[first : first + together]
            run = (
                list(tensors[chosen.start : chosen.stop])
                if isinstance(chosen, range)
                else [tensors[index] for index in chosen]
            )
            begin = self.begin + first * size
            target = memory[begin : begin + len(run) * size]
            if self.is_small:
                _copy_run(run, self.shape, self.devices, target)
            else:
                copy_to(target, run[0], self.place)


class _PlanOutdated(Exception):
    """A tensor has another shape or device than in the plan."""


def _copy_run(
    tensors: Sequence[torch.Tensor],
    shape: Shape,
    devices: Collection[torch.device],
    target_bytes: torch.Tensor,
) -> None:
    """Copy tensors of one type and shape, each by a fraction of a call.

    Raises :class:`_PlanOutdated` if one has another shape or device: torch.stack compares them
    anyway, so that they need not be compared one by one.
    """
    if tensors[0].shape != shape or tensors[0].device not in devices:
        raise _PlanOutdated
    target = target_bytes.view(tensors[0].dtype).view(len(tensors), *shape)
    gpus = [device for device in devices if device.type != "cpu"]
    try:
        if len(gpus) == 1 == len(devices):
            target.copy_(torch.stack(list(tensors)), non_blocking=True)
            return
        run = list(tensors)
        for device in gpus:  # such as the moments of an optimizer, between its steps on the CPU
            there = [index for index, tensor in enumerate(run) if tensor.device == device]
            if there:
                host = torch.stack([run[index] for index in there]).cpu()
                for index, tensor in zip(there, host, strict=True):
                    run[index] = tensor
        torch.stack(run, out=target)
    except RuntimeError:
        if any(t.shape != shape or t.device not in devices for t in tensors):
            raise _PlanOutdated from None
        raise


@dataclass(frozen=True)
class NamedState:
    """A state that is saved, and what one rank writes of it."""

    specs: Mapping[str, TensorSpec]  # of all tensors
    specs_xxh3_128: str
    pieces: Pieces
    tree: Node
    types: Types


def digest_of(specs: Mapping[str, TensorSpec]) -> str:
    """Equal for writers that save the same tensors."""
    listed = (json.dumps([spec.name, spec.dtype, spec.shape]) for spec in specs.values())
    return digest(f"[{', '.join(listed)}]".encode("ascii"))


@dataclass(frozen=True)
class SaveContent:
    """What one rank saves of the states of one structure, by name."""

    specs: Mapping[str, TensorSpec]  # of all tensors
    pieces: Pieces
    tree: ValueTree
    types: Types

    @functools.cached_property
    def specs_xxh3_128(self) -> str:
        return digest_of(self.specs)

    def begin_of(self, spec: TensorSpec, chunk: Extent) -> int:
        """Where a chunk begins in the body of the file."""
        spans, regions = self._starts
        if isinstance(chunk, Span):
            return spans[spec.name] + chunk.start * spec.element_bytes
        return regions[spec.name, chunk]

    @functools.cached_property
    def _starts(self) -> tuple[dict[str, int], dict[tuple[str, Region], int]]:
        """Where element 0 of each tensor would be, of which this rank has a span; and where each
        chunk of a region begins."""
        spans: dict[str, int] = {}
        regions: dict[tuple[str, Region], int] = {}
        begin = 0
        for spec, place in self.pieces:
            if isinstance(place, Span):
                spans[spec.name] = begin - place.start * spec.element_bytes
            else:
                at = begin
                for chunk in chunks_of(place, spec.element_bytes):
                    assert isinstance(chunk, Region)
                    regions[spec.name, chunk] = at
                    at += chunk.count * spec.element_bytes
            begin += place.count * spec.element_bytes
        return spans, regions


@dataclass(frozen=True)
class SavePlan:
    """What one rank copies of the states of one structure.

    ``content`` is derived when it is first asked for, by the writer thread.
    """

    segments: tuple[_Segment, ...]
    content: Callable[[], SaveContent] = field(compare=False)

    @property
    def size_bytes(self) -> int:
        """The size of this rank's share."""
        return self.segments[-1].end if self.segments else 0

    @functools.cached_property
    def gpus(self) -> frozenset[torch.device]:
        """The GPUs that hold tensors of this rank's share."""
        devices = frozenset[torch.device]().union(*(s.devices for s in self.segments))
        return frozenset(device for device in devices if device.type == "cuda")


@dataclass(frozen=True)
class PlannedSave:
    """One state with its plan."""

    plan: SavePlan
    tensors: Sequence[torch.Tensor]
    values: Sequence[Node] | None  # None: those of the plan's tree

    def copy_into(self, memory: torch.Tensor) -> None:
        """Copy this rank's share into ``memory``, in the order of the file. The tensors may change
        once this returns."""
        with torch.no_grad():
            for segment in self.plan.segments:
                segment.copy(self.tensors, memory)
        for device in self.plan.gpus:
            torch.cuda.current_stream(device).synchronize()

    def named(self) -> NamedState:
        """The state by name. Called by the writer thread."""
        content = self.plan.content()
        tree = content.tree
        node = tree.node if self.values is None else tree.with_values(self.values)
        return NamedState(
            content.specs, content.specs_xxh3_128, content.pieces, node, content.types
        )


# ----------------------------------------------------------------------------
# Reading a state.


class _Level(NamedTuple):
    """The items of a state at one depth, in order, without tensors and values."""

    kinds: list[type]
    sizes: list[int]  # of the containers
    keys: list[str | int]  # of the dicts
    # The position, class and detail of the items that were converted: see checkpoints.values.
    types: list[tuple[int, str, Any]]


@dataclass(frozen=True)
class _Leaves:
    """The structure of a state, level by level, and its leaves in that order."""

    structure: list[_Level]
    tensors: list[torch.Tensor]
    values: list[object]

    @classmethod
    def of(cls, state: object, structure: list[_Level] | None = None) -> _Leaves | None:
        """None for a state that has to be read item by item, such as one with DTensors; and for one
        that differs from ``structure``. Raises :class:`StateError`, without the path."""
        leaves = cls([], [], [])
        items: list[Any] = [state]
        kept: list[list[Any]] = []  # so that no address is used again
        known: set[int] = set()
        is_shared, count = False, 1
        for _ in range(MAX_DEPTH + 2):
            level, items = _level_of(items)
            if level is None or (structure is not None and level != structure[len(kept)]):
                return None
            leaves.structure.append(level)
            leaves.tensors.extend(_those_of(_TENSORS, items, level.kinds))
            leaves.values.extend(_those_of(PLAIN, items, level.kinds))
            parents = _those_of(_CONTAINERS, items, level.kinds)
            if not parents:
                return leaves
            # A list that contains itself twice would double each level.
            identities = set(map(id, parents))
            is_shared |= not known.isdisjoint(identities)
            known |= identities
            kept.append(parents)
            items = list(chain.from_iterable(_parts_of(parents)))
            count += len(items)
            if is_shared and count > _MAX_SHARED_ITEMS:
                return None
        return None


_MAX_SHARED_ITEMS = 1_000_000


def _level_of(items: list[Any]) -> tuple[_Level | None, list[Any]]:
    """The level of these items, and the items, with the plain forms of those that a tree does not
    hold. None if they have to be read one by one."""
    types: list[tuple[int, str, Any]] = []
    kinds = list(map(type, items))
    if others := frozenset(kinds) - _EXACT:
        items = list(items)
        for index, kind in enumerate(kinds):
            if kind in others:
                if issubclass(kind, torch.Tensor):
                    return None, items
                items[index], *detail = plain_item(items[index])
                types.append((index, *detail))
        kinds = list(map(type, items))
    dicts = _those_of((dict,), items, kinds)
    keys: list[Any] = list(chain.from_iterable(dicts))
    of_keys = frozenset(map(type, keys))
    if not {str, int}.issuperset(of_keys):  # True would be equal to 1
        items = list(items)
        for index, item in enumerate(items):
            if type(item) is dict and not has_plain_keys(item):
                items[index], *detail = plain_item(item)
                types.append((index, *detail))
        kinds = list(map(type, items))
        dicts = _those_of((dict,), items, kinds)
        keys = list(chain.from_iterable(dicts))
        of_keys = frozenset(map(type, keys))
    if not _EXACT.issuperset(kinds) or (int in of_keys and not _are_plain(keys, dicts)):
        return None, items
    sizes = list(map(len, _those_of(_CONTAINERS, items, kinds)))
    return _Level(kinds, sizes, keys, types), items


def _are_plain(keys: list[Any], dicts: list[dict[Any, Any]]) -> bool:
    """Whether the keys, of these dicts, need no further check: integers are small, and no dict has
    an integer and its text, which would be one path."""
    if any(type(key) is int and key.bit_length() > 64 for key in keys):
        return False
    has_texts = str in map(type, keys)
    return not has_texts or all(len(set(map(str, keys))) == len(keys) for keys in dicts)


def _those_of(wanted: Collection[type], items: list[Any], kinds: list[type]) -> list[Any]:
    """The items whose type is wanted."""
    present = frozenset(kinds)
    if present.issubset(wanted):
        return items
    if present.isdisjoint(wanted):
        return []
    return list(compress(items, map(wanted.__contains__, kinds)))


def _parts_of(parents: list[Any]) -> Iterable[Iterable[Any]]:
    return (p.values() if type(p) is dict else p for p in parents)


_Key = tuple[torch.dtype, torch.Size, bool]


class _Numbering(dict[_Key, int]):
    """Numbers keys in the order in which they are asked for."""

    def __missing__(self, key: _Key) -> int:
        self[key] = number = len(self)
        return number


class _Kind(NamedTuple):
    """What tensors that are copied together have in common."""

    dtype: torch.dtype
    shape: torch.Size
    devices: frozenset[torch.device]


@dataclass(frozen=True)
class _Kinds:
    """The kinds of tensors, and the kind of each."""

    all: list[_Kind]
    of_each: list[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Kinds:
        numbering = _Numbering()
        of_each = list(map(numbering.__getitem__, map(_KIND, tensors)))
        devices = [{_CPU} if is_cpu else set[torch.device]() for _, _, is_cpu in numbering]
        if not all(devices):
            for number, tensor in zip(of_each, tensors, strict=True):
                devices[number].add(tensor.device)
        kinds = zip(numbering, devices, strict=True)
        every = [_Kind(dtype, shape, frozenset(on)) for (dtype, shape, _), on in kinds]
        return cls(every, of_each)

    @property
    def dtypes(self) -> list[torch.dtype]:
        return list(map([kind.dtype for kind in self.all].__getitem__, self.of_each))

    @property
    def sizes(self) -> list[int]:
        """The size of each tensor in bytes."""
        of_kind = [math.prod(kind.shape) * kind.dtype.itemsize for kind in self.all]
        return list(map(of_kind.__getitem__, self.of_each))


_CPU, _META = torch.device("cpu"), torch.device("meta")
_KIND = attrgetter("dtype", "shape", "is_cpu")  # quicker than the device
_DTYPE = attrgetter("dtype")
_SHAPE = attrgetter("shape", "device")


@dataclass(frozen=True)
class _Memory:
    """The types of tensors, and which of them share memory."""

    dtypes: list[torch.dtype]
    distinct: int  # the number of addresses
    # The tensors whose address another one has, and the first one at that address. Those that also
    # have the same type, shape and view are saved once.
    shared: list[tuple[int, int]]
    views: list[tuple[object, ...]]  # of the tensors that share an address
    empty: int | None  # the first one without an address

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], kinds: _Kinds) -> _Memory | None:
        """None if there are tensors without plain bytes in memory of their own. Raises RuntimeError
        for some kinds of those, such as sparse ones."""
        if any(k.dtype not in by_dtype() or _META in k.devices for k in kinds.all):
            return None
        sizes = kinds.sizes
        held = list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)))
        if held != sizes:  # some are not all of their memory
            parts = zip(tensors, sizes, held, strict=True)
            if not all(has_plain_bytes(tensor) for tensor, size, of in parts if size != of):
                return None
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        distinct = frozenset(addresses)
        if 0 in distinct and any(s and not a for s, a in zip(sizes, addresses, strict=True)):
            return None
        shared = list[tuple[int, int]]()
        if len(distinct) < len(addresses):
            first: dict[int, int] = {}
            first_at = [first.setdefault(address, i) for i, address in enumerate(addresses)]
            shared = [(i, other) for i, other in enumerate(first_at) if other != i]
        return cls(
            dtypes=kinds.dtypes,
            distinct=len(distinct),
            shared=shared,
            views=_views(tensors, shared),
            empty=addresses.index(0) if 0 in distinct else None,
        )

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors have the same types, and share memory in the same way."""
        addresses = _addresses(tensors)
        if addresses is None:
            return False
        distinct = frozenset(addresses)
        # Those that shared memory still do. If there are as many addresses, no others do.
        return (
            len(distinct) == self.distinct
            and all(addresses[i] == addresses[other] for i, other in self.shared)
            and (0 in distinct) == (self.empty is not None)
            and (self.empty is None or addresses[self.empty] == 0)
            and list(map(_DTYPE, tensors)) == self.dtypes
            and _views(tensors, self.shared) == self.views
        )

    def ties(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """The tensors that are an earlier one, and that one."""
        first: dict[tuple[object, ...], int] = {}
        ties = {}
        for index in sorted({*chain.from_iterable(self.shared)}):
            if tensors[index].numel():
                earlier = first.setdefault(memory_identity(tensors[index]), index)
                if earlier != index:
                    ties[index] = earlier
        return ties


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        return None


def _views(
    tensors: Sequence[torch.Tensor], shared: Sequence[tuple[int, int]]
) -> list[tuple[object, ...]]:
    sharing = (tensors[i] for i in sorted({*chain.from_iterable(shared)}))
    return [(t.stride(), t.is_conj(), t.is_neg()) for t in sharing]


# ----------------------------------------------------------------------------
# Planning.


def _plan_of_leaves(
    leaves: _Leaves, world_size: int, rank: int, section: tuple[int, ...] | None
) -> tuple[SavePlan, _Memory] | None:
    """The plan for a state that was read by level; None if it has to be read item by item."""
    try:
        kinds = _Kinds.of(leaves.tensors)
        memory = _Memory.of(leaves.tensors, kinds)
    except RuntimeError:  # a tensor without a shape or storage
        return None
    if memory is None:
        return None
    ties = memory.ties(leaves.tensors)
    segments = tuple(_divided(_groups(kinds, ties), world_size, rank, section))
    structure = leaves.structure
    content = functools.cache(lambda: _content_of(structure, kinds, ties, segments))
    return SavePlan(segments, content), memory


@dataclass(frozen=True)
class _Group:
    """All tensors of one type and shape."""

    spec: TensorSpec  # without a name
    tensors: Sequence[int]
    devices: frozenset[torch.device]


def _groups(kinds: _Kinds, ties: Mapping[int, int]) -> list[_Group]:
    """The groups of a state, in the order of the file."""
    of_kind: list[list[int]] = [[] for _ in kinds.all]
    for index, number in enumerate(kinds.of_each):
        of_kind[number].append(index)
    if ties:
        of_kind = [[index for index in each if index not in ties] for each in of_kind]
    alike: dict[tuple[str, Shape], list[int]] = {}  # kinds that differ in their devices only
    for number, kind in enumerate(kinds.all):
        alike.setdefault((by_dtype()[kind.dtype].name, tuple(kind.shape)), []).append(number)
    groups = [
        _Group(
            TensorSpec("", dtype, shape),
            _in_order([of_kind[number] for number in numbers]),
            frozenset[torch.device]().union(*(kinds.all[number].devices for number in numbers)),
        )
        for (dtype, shape), numbers in alike.items()
    ]
    return sorted(groups, key=lambda group: file_order(group.spec))


def _in_order(numbers: list[list[int]]) -> Sequence[int]:
    """All numbers; as a range if they follow each other."""
    every = numbers[0] if len(numbers) == 1 else sorted(chain.from_iterable(numbers))
    is_range = bool(every) and every[-1] - every[0] + 1 == len(every)
    return range(every[0], every[-1] + 1) if is_range else every


def _divided(
    groups: Sequence[_Group], world_size: int, rank: int, section: Sequence[int] | None
) -> Iterator[_Segment]:
    """What ``rank`` writes: as :func:`~checkpoints.tensors.share_of`, without a step for each
    tensor."""
    total = sum(group.spec.size_bytes * len(group.tensors) for group in groups)
    among = range(world_size) if section is None else section
    part = among.index(rank)
    low, high = total * part // len(among), total * (part + 1) // len(among)
    before = end = 0  # of the bytes of all groups; of this rank's file
    for group in groups:
        spec, tensors = group.spec, group.tensors
        for numbers, place in _cuts(spec, len(tensors), low - before, high - before, part == 0):
            chosen = tensors[numbers.start : numbers.stop]
            segment = _Segment(chosen, spec.dtype, spec.shape, place, end, group.devices)
            yield segment
            end = segment.end
        before += spec.size_bytes * len(tensors)


def _cuts(
    spec: TensorSpec, count: int, low: int, high: int, is_first: bool
) -> Iterator[tuple[range, Span]]:
    """Which of ``count`` tensors lie between two offsets in bytes, and which elements of them."""
    size, whole = spec.size_bytes, Span(0, spec.count)
    if not size:
        if is_first and count:
            yield range(count), whole
        return
    first, last = max(low // size, 0), min(high // size, count - 1)
    between = [range(first + 1, last), range(last, last + 1)] if first < last else []
    cuts: list[tuple[range, Span]] = []
    for numbers in (range(first, min(first, last) + 1), *between):
        if not numbers:
            continue
        start, stop = (element_at(cut - numbers.start * size, spec) for cut in (low, high))
        place = Span(start, stop - start)
        if cuts and cuts[-1][1] == place == whole:
            cuts[-1] = (range(cuts[-1][0].start, numbers.stop), whole)
        elif start < stop:
            cuts.append((numbers, place))
    yield from cuts


# ----------------------------------------------------------------------------
# Names, for the writer thread.


def _content_of(
    structure: Sequence[_Level],
    kinds: _Kinds,
    ties: Mapping[int, int],
    segments: Sequence[_Segment],
) -> SaveContent:
    """The names of what was read by level: those that :func:`~checkpoints.tree.flatten` gives."""
    paths = _Paths.of(structure)
    names = paths.names(ties)
    specs = SpecTable()
    dtypes = [by_dtype()[kind.dtype].name for kind in kinds.all]
    for index, kind in enumerate(kinds.of_each):
        if index not in ties:
            specs.add(TensorSpec(names[index], dtypes[kind], tuple(kinds.all[kind].shape)))
    tree = ValueTree(_tree_of(structure, names))
    return SaveContent(specs, _NamedPieces(segments, names), tree, paths.types)


@dataclass(frozen=True)
class _NamedPieces:
    """The pieces of segments, made one by one: the garbage collector would visit 100,000 of them,
    and with them all objects of the process, and hold the GIL for 0.2 s each time."""

    segments: Sequence[_Segment]
    names: Sequence[str]

    def __iter__(self) -> Iterator[tuple[TensorSpec, Extent]]:
        for segment in self.segments:
            for index in segment.tensors:
                spec = TensorSpec(self.names[index], segment.dtype, segment.shape)
                yield spec, segment.place


@dataclass(frozen=True)
class _Paths:
    """The paths of tensors, in the order of the leaves; and the paths and types of converted
    items."""

    texts: list[str]
    # For each tensor its position in each level from the first to its own.
    positions: Callable[[int], tuple[int, ...]]
    types: Types

    @classmethod
    def of(cls, structure: Sequence[_Level]) -> _Paths:
        texts, tensors, parents = list[str](), list[tuple[int, int]](), list[list[int]]()
        parts: list[list[str | int]] = []  # the last key of the path of each item
        level_texts = [""]
        types: list[list[Any]] = []

        def ancestors(depth: int, index: int) -> Iterator[tuple[int, int]]:
            while depth:
                yield depth, index
                index, depth = parents[depth - 1][index], depth - 1

        for depth, level in enumerate(structure):
            for index, name, detail in level.types:
                path = [parts[d - 1][i] for d, i in ancestors(depth, index)]
                types.append([path[::-1], name, detail])
            sizes, keys = iter(level.sizes), iter(level.keys)
            below: list[str] = []
            parents.append([])
            parts.append([])
            for index, kind in enumerate(level.kinds):
                if kind in _TENSORS:
                    texts.append(level_texts[index])
                    tensors.append((depth, index))
                elif kind in _CONTAINERS:
                    size = next(sizes)
                    of_item = list(islice(keys, size)) if kind is dict else list(range(size))
                    before = f"{level_texts[index]}/" if depth else ""
                    below += [before + escaped(key) for key in of_item]
                    parents[-1] += [index] * size
                    parts[-1] += of_item
            level_texts = below

        def positions(tensor: int) -> tuple[int, ...]:
            return tuple(index for _, index in ancestors(*tensors[tensor]))[::-1]

        return cls(texts, positions, types)

    def names(self, ties: Mapping[int, int]) -> list[str]:
        """The name of each tensor. Tied ones have the name of the one that comes first in the
        text of the state."""
        first = {index: index for index in ties.values()}
        for index, earlier in ties.items():
            first[earlier] = min(first[earlier], index, key=self.positions)
        used: set[str] = set()
        names = list(self.texts)
        for index in range(len(names)):
            if index not in ties:
                names[index] = unused_name(self.texts[first.get(index, index)], used)
                used.add(names[index])
        for index, earlier in ties.items():
            names[index] = names[earlier]
        return names


def _tree_of(structure: Sequence[_Level], names: Sequence[str]) -> Node:
    """The tree, with a placeholder for each value."""
    below: list[Node] = []
    tensors = iter(reversed(names))
    for level in reversed(structure):
        parts, keys = iter(below), iter(level.keys)
        sizes = iter(level.sizes)
        own = [next(tensors) for kind in level.kinds if kind in _TENSORS][::-1]
        of_tensors = iter(own)
        nodes: list[Node] = []
        for kind in level.kinds:
            if kind in _TENSORS:
                nodes.append({"tensor": next(of_tensors)})
            elif kind not in _CONTAINERS:
                nodes.append({"value": None})
            elif kind is not dict:
                nodes.append({kind.__name__: list(islice(parts, next(sizes)))})
            else:
                size = next(sizes)
                of_dict = list(islice(keys, size))
                items = islice(parts, size)
                if all(type(key) is str for key in of_dict):
                    nodes.append({"dict": dict(zip(of_dict, items, strict=True))})
                else:
                    nodes.append({"items": [[k, v] for k, v in zip(of_dict, items, strict=True)]})
        below = nodes
    return below[0]


class ValueTree:
    """A tree whose values can be replaced, in the order of the leaves."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._values: dict[int, int] = {}  # the number of each value, by the identity of its node
        levels, level = [], [node]
        while level:
            levels.append(level)
            for each in level:
                if not each.keys().isdisjoint(("value", "float")):
                    self._values[id(each)] = len(self._values)
            level = list(chain.from_iterable(map(_children, level)))
        self._varying = set(self._values)  # the nodes with a value in them
        for level in reversed(levels):
            self._varying.update(
                id(each) for each in level if not self._varying.isdisjoint(map(id, _children(each)))
            )

    def with_values(self, values: Sequence[Node]) -> Node:
        """A copy of the tree with other values; what has none in it is shared."""

        def copied(node: Node) -> Node:
            if id(node) not in self._varying:
                return node
            ((kind, body),) = node.items()
            if kind in ("value", "float"):
                return values[self._values[id(node)]]
            if kind == "dict":
                return {kind: {key: copied(item) for key, item in body.items()}}
            if kind == "items":
                return {kind: [[key, copied(item)] for key, item in body]}
            return {kind: [copied(item) for item in body]}

        return copied(self.node)


def _children(node: Node) -> Collection[Node]:
    ((kind, body),) = node.items()
    if kind == "dict":
        return body.values()  # type: ignore[no-any-return]
    if kind == "items":
        return [item for _, item in body]
    return body if kind in ("list", "tuple") else ()


# ----------------------------------------------------------------------------
# Planning a state that is read item by item.


def _plan_of_items(
    state: object, world_size: int, rank: int, section: tuple[int, ...] | None
) -> PlannedSave:
    """Raises :class:`StateError`, with the path of what cannot be saved."""
    plain, types = plain_form(state)
    tree, tensors = flatten(plain)
    specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
    pieces = share_of(tuple(specs.values()), world_size, rank, section)
    held = [tensors[spec.name] for spec, _ in pieces]
    segments: list[_Segment] = []
    end = 0
    for run in _runs(pieces):
        spec, place = pieces[run.start]
        devices = frozenset(held[index].device for index in run)
        segments.append(_Segment(run, spec.dtype, spec.shape, place, end, devices))
        end = segments[-1].end
    content = SaveContent(specs, pieces, ValueTree(tree), types)
    return PlannedSave(SavePlan(tuple(segments), lambda: content), held, None)


def _runs(pieces: Sequence[tuple[TensorSpec, Extent]]) -> Iterator[range]:
    """The pieces that are copied together: complete small tensors of one type and shape."""
    first = 0
    for index, (spec, place) in enumerate(pieces):
        before, earlier = pieces[first]
        is_alike = (spec.dtype, spec.shape, place) == (before.dtype, before.shape, earlier)
        is_small = place == Span(0, spec.count) and spec.size_bytes <= _SMALL_BYTES
        if index > first and not (is_alike and is_small):
            yield range(first, index)
            first = index
    if pieces:
        yield range(first, len(pieces))


# ----------------------------------------------------------------------------
# Comparing a state with the last one.


@dataclass(frozen=True)
class _Last:
    """The last state, without its tensors."""

    writers: tuple[object, ...]
    structure: list[_Level]
    memory: _Memory
    # The tensors that no run copies within the CPU, which compares shapes and devices; and those.
    alone: list[int]
    shapes: list[tuple[tuple[int, ...], torch.device]]
    plan: SavePlan

    @classmethod
    def of(
        cls, writers: tuple[object, ...], leaves: _Leaves, memory: _Memory, plan: SavePlan
    ) -> _Last:
        runs = (s.tensors for s in plan.segments if s.is_small and s.devices == {_CPU})
        in_runs = set[int]().union(*runs)
        alone = [index for index in range(len(leaves.tensors)) if index not in in_runs]
        shapes = [_SHAPE(leaves.tensors[index]) for index in alone]
        return cls(writers, leaves.structure, memory, alone, shapes, plan)

    def plan_of(self, state: object, writers: tuple[object, ...]) -> PlannedSave | None:
        """The plan for a state that differs from the last one in values only; None for another one.

        Raises :class:`StateError` for a value that cannot be saved.
        """
        leaves = _Leaves.of(state, self.structure) if writers == self.writers else None
        if leaves is None or not self.memory.fits(leaves.tensors):
            return None
        if [_SHAPE(leaves.tensors[index]) for index in self.alone] != self.shapes:
            return None
        return PlannedSave(self.plan, leaves.tensors, _value_nodes(leaves))


def _value_nodes(leaves: _Leaves) -> list[Node]:
    return [value_node(value, ()) for value in leaves.values]


class SavePlanner:
    """The plan of the last state, for one owner and thread. Holds no tensors."""

    def __init__(self) -> None:
        self._last: _Last | None = None

    def copy(
        self,
        state: object,
        memory: Callable[[SavePlan], torch.Tensor],
        *,
        world_size: int,
        rank: int,
        section: tuple[int, ...] | None = None,
    ) -> PlannedSave:
        """Plan a save of ``state`` by these writers, and copy this rank's share into what
        ``memory`` returns for the plan. The tensors may change once this returns.

        Raises as :meth:`plan` does.
        """
        for _ in range(2):
            planned = self.plan(state, world_size=world_size, rank=rank, section=section)
            with contextlib.suppress(_PlanOutdated):
                planned.copy_into(memory(planned.plan))
                return planned
            self._last = None
        raise AssertionError  # a new plan is that of the state

    def plan(
        self,
        state: object,
        *,
        world_size: int,
        rank: int,
        section: tuple[int, ...] | None = None,
    ) -> PlannedSave:
        """The plan for ``state`` for these writers, and its tensors. Copies no tensor.

        A kept plan may be for other shapes or devices, which :meth:`copy` would find.

        Raises :class:`StateError` for a state that cannot be saved, :class:`ArgumentError` for
        DTensors of another mesh.
        """
        writers = (world_size, rank, section)
        with contextlib.suppress(StateError):  # raised below, with its path
            if self._last is not None:
                planned = self._last.plan_of(state, writers)
                if planned is not None:
                    return planned
            leaves = _Leaves.of(state)
            if leaves is not None:
                values = _value_nodes(leaves)
                if (planned_now := _plan_of_leaves(leaves, world_size, rank, section)) is not None:
                    plan, memory = planned_now
                    self._last = _Last.of(writers, leaves, memory, plan)
                    return PlannedSave(plan, leaves.tensors, values)
        return _plan_of_items(state, world_size, rank, section)
