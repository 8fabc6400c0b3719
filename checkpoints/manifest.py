"""The manifest of a checkpoint: its content, parser, lineage and coverage."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

import xxhash

from checkpoints.errors import ArgumentError, CorruptCheckpoint, UnsupportedFormat
from checkpoints.names import MAX_WORLD_SIZE, CheckpointName, writer_file
from checkpoints.tensors import BY_NAME, Extent, Region, Span, TensorSpec
from checkpoints.tree import MAX_DEPTH, Node, Types, check_tree, text_of

# ----------------------------------------------------------------------------
# Checksummed JSON: a document that contains its own hash. Used for manifests and parts.
#
# The file begins with ``{"xxh3_128": "<32 hex>",`` and a newline; the hash covers every byte after
# that, so any flipped or missing byte is detected. It is strict JSON: no NaN, no duplicate
# keys; one top-level field per line, for grep and diff.

MAX_DOCUMENT_BYTES = 512 << 20  # about three million chunks: 48 TB of tensors

_BEFORE = b'{"xxh3_128": "'
_AFTER = b'",\n'
_PREFIX_BYTES = len(_BEFORE) + 32 + len(_AFTER)


Hasher = xxhash.xxh3_128
"""Incremental xxh3-128."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 as 32 hex digits. Releases the GIL for large inputs."""
    hashed = Hasher()
    hashed.update(data)  # unlike xxhash's functions, update() releases the GIL in every version
    return str(hashed.hexdigest())


def encode(fields: Mapping[str, object]) -> bytes:
    """The bytes of a document. Deterministic: equal fields give equal bytes.

    The value of a large field is an iterator over pieces of its JSON text: json.dumps holds the GIL
    until it returns, which would stop training for a second where a state has 100,000 tensors.
    """
    body = bytearray()
    for key, value in fields.items():
        body += f",\n{json.dumps(key)}: ".encode("ascii")
        for piece in value if isinstance(value, Iterator) else (as_text(value),):
            body += piece.encode("ascii")
    body += b"\n}\n"
    del body[:2]
    return b"".join((_BEFORE, digest(body).encode("ascii"), _AFTER, body))


def as_text(value: object) -> str:
    """Strict and compact JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _object(pairs: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """The text of an object, in pieces."""
    before = "{"
    for key, pieces in pairs:
        yield f"{before}{json.dumps(key)}:"
        yield from pieces
        before = ","
    yield "}" if before == "," else "{}"


def _array(items: Iterable[str]) -> Iterator[str]:
    """The text of an array, in pieces."""
    before = "["
    for item in items:
        yield f"{before}{item}"
        before = ","
    yield "]" if before == "," else "[]"


def _integers(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def decode(
    data: bytes, file: str, readers: Mapping[str, Callable[[Scanner], Any]]
) -> dict[str, Any]:
    """The fields of a document, without its hash. ``readers``: those of large fields.

    Raises :class:`CorruptCheckpoint`.
    """
    body = memoryview(data)[_PREFIX_BYTES:]
    if data[:_PREFIX_BYTES] != _BEFORE + digest(body).encode("ascii") + _AFTER:
        raise CorruptCheckpoint("its checksum does not match its content", file=file)
    try:
        scanner = Scanner(data.decode())
        fields = scanner.object(readers)
        scanner.end()
    except (ValueError, RecursionError) as error:
        # The hash matches, so it was crafted: deep nesting, NaN, duplicate keys.
        raise CorruptCheckpoint(f"not strict JSON: {str(error)[:200]}", file=file) from error
    del fields["xxh3_128"]
    return fields


class Scanner:
    """Strict JSON, read value by value.

    json.loads makes a dict and three lists for each of 100,000 chunks before anything can be done
    with the first one. So many objects make the garbage collector visit all objects of the process,
    several times, and hold the GIL for 0.2 s each time (measured).
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._offset = 0

    def value(self) -> Any:
        """The next value, with all that is in it."""
        value, self._offset = _DECODER.raw_decode(self._text, self._begin())
        return value

    def object(self, readers: Mapping[str, Callable[[Scanner], Any]]) -> dict[str, Any]:
        """The next value, an object; ``readers`` read some of its fields."""
        return {key: readers.get(key, Scanner.value)(self) for key in self.each_key()}

    def each_key(self) -> Iterator[str]:
        """The keys of an object. Before the next one, the caller reads the value of this one."""
        known: set[str] = set()
        for _ in self._items("{", "}"):
            key = self.value()
            if not isinstance(key, str) or key in known:
                raise ValueError("duplicate key in an object, or one that is no string")
            known.add(key)
            if not self.begins(":"):
                raise ValueError(f"expected ':' at character {self._offset}")
            self._offset += 1
            yield key

    def each_item(self) -> Iterator[None]:
        """The items of an array, each read by the caller."""
        return self._items("[", "]")

    def begins(self, text: str) -> bool:
        """Whether the next value begins with this text."""
        return self._text.startswith(text, self._begin())

    def end(self) -> None:
        """Raise ValueError if anything follows."""
        if self._begin() != len(self._text):
            raise ValueError(f"more text at character {self._offset}")

    def _items(self, opening: str, closing: str) -> Iterator[None]:
        mark = opening
        while True:
            if not self.begins(mark):
                raise ValueError(f"expected {mark!r} at character {self._offset}")
            self._offset += 1
            if mark == opening and self.begins(closing):
                break
            yield
            if self.begins(closing):
                break
            mark = ","
        self._offset += 1

    def _begin(self) -> int:
        """Skip whitespace."""
        if self._text[self._offset : self._offset + 1].isspace():
            space = _SPACE.match(self._text, self._offset)
            assert space is not None  # it may be empty
            self._offset = space.end()
        return self._offset


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("duplicate key in an object")
    return fields


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
_SPACE = re.compile(r"[ \t\n\r]*")


# ----------------------------------------------------------------------------
# The manifest (``manifest.json``) and the parts it is merged from, as frozen dataclasses.
#
# ``manifest.schema.json`` in this package describes the format for other readers;
# the parser below reads it without trusting its content.

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Ancestor:
    """One generation of a lineage, and the step at which it began."""

    generation: int
    began_at_step: int


Lineage = tuple[Ancestor, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes ``[begin, end)`` of a writer's file, their place in the tensor, and their hash."""

    file: str
    begin: int
    end: int
    place: Extent
    xxh3_128: str

    def as_text(self) -> str:
        """The JSON text. File and hash contain no character that JSON escapes."""
        if isinstance(self.place, Span):
            place = f'"span":[{self.place.start},{self.place.count}]'
        else:
            place = f'"box":[{_integers(self.place.offset)},{_integers(self.place.shape)}]'
        return (
            f'{{"file":"{self.file}","bytes":[{self.begin},{self.end}],{place},'
            f'"xxh3_128":"{self.xxh3_128}"}}'
        )


class ChunkTable(Mapping[str, tuple[Chunk, ...]]):
    """The chunks of tensors, as one flat tuple for each tensor until they are asked for.

    The garbage collector stops to track tuples of numbers and strings. It would visit 100,000
    chunks, and with them every other object of the process, four times in a save, and hold the GIL
    for 0.2 s each time (measured).
    """

    def __init__(self) -> None:
        # Of each chunk file, begin, end, hash, number of dimensions, and offset and shape; for a
        # span None, start and count.
        self._rows: dict[str, tuple[Any, ...]] = {}

    def add(self, tensor: str, chunks: Iterable[Chunk]) -> None:
        """Add chunks of a tensor."""
        row = list(self._rows.get(tensor, ()))
        for chunk in chunks:
            place = chunk.place
            row += (chunk.file, chunk.begin, chunk.end, chunk.xxh3_128)
            if isinstance(place, Span):
                row += (None, place.start, place.count)
            else:
                row += (len(place.shape), *place.offset, *place.shape)
        if row:
            self._rows[tensor] = tuple(row)

    def update(self, other: ChunkTable) -> None:
        """Add all chunks of ``other``, which has other chunks."""
        for tensor, row in other._rows.items():
            self._rows[tensor] = self._rows.get(tensor, ()) + row

    def replace(self, tensor: str, chunks: Iterable[Chunk]) -> None:
        """Replace the chunks of a tensor."""
        del self._rows[tensor]
        self.add(tensor, chunks)

    def __getitem__(self, tensor: str) -> tuple[Chunk, ...]:
        return tuple(self._chunks(self._rows[tensor]))

    def _chunks(self, row: tuple[Any, ...]) -> Iterator[Chunk]:
        at = 0
        while at < len(row):
            file, begin, end, hashed, dims = row[at : at + 5]
            middle, at = at + 5 + (dims or 1), at + 5 + 2 * (1 if dims is None else dims)
            place: Extent
            if dims is None:
                place = Span(row[at - 2], row[at - 1])
            else:
                place = Region(row[middle - dims : middle], row[middle:at])
            yield Chunk(file, begin, end, place, hashed)

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class SpecTable(Mapping[str, TensorSpec]):
    """The types and shapes of tensors, kept as :class:`ChunkTable` keeps chunks."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Any, ...]] = {}

    def add(self, spec: TensorSpec) -> None:
        self._rows[spec.name] = (spec.dtype, *spec.shape)

    def update(self, others: Mapping[str, TensorSpec]) -> None:
        """Add all of ``others``."""
        if isinstance(others, SpecTable):
            self._rows |= others._rows
            return
        for spec in others.values():
            self.add(spec)

    def __getitem__(self, tensor: str) -> TensorSpec:
        dtype, *shape = self._rows[tensor]
        return TensorSpec(tensor, dtype, tuple(shape))

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A global tensor and the chunks that cover each of its elements once."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]

    def pieces(self) -> Iterator[str]:
        """The JSON text, in pieces."""
        yield f'{{"dtype":"{self.spec.dtype}","shape":{_integers(self.spec.shape)},"chunks":'
        yield from _array(chunk.as_text() for chunk in self.chunks)
        yield "}"


class TensorTable(Mapping[str, TensorEntry]):
    """Tensors with their chunks, each made when it is asked for."""

    def __init__(
        self, specs: Mapping[str, TensorSpec], chunks: Mapping[str, tuple[Chunk, ...]]
    ) -> None:
        self._specs = specs
        self._chunks = chunks

    def __getitem__(self, tensor: str) -> TensorEntry:
        return TensorEntry(self._specs[tensor], self._chunks.get(tensor, ()))

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


@dataclass(frozen=True)
class WriterEntry:
    """One writer's file. The header has its own hash because no chunk covers it."""

    rank: int
    file: str
    size_bytes: int
    header_bytes: int
    header_xxh3_128: str
    wall_time_s: float

    def as_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "file": self.file,
            "size_bytes": self.size_bytes,
            "header_bytes": self.header_bytes,
            "header_xxh3_128": self.header_xxh3_128,
            "wall_time_s": self.wall_time_s,
        }


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``. It does not depend on which writer commits."""

    name: CheckpointName
    lineage: Lineage
    world_size: int
    data_position: Any  # JSON
    wall_time_s: float  # of the last writer
    versions: Mapping[str, str]  # of writer 0
    writers: tuple[WriterEntry, ...]  # by rank
    tensors: Mapping[str, TensorEntry]
    tree: Node
    types: Types = ()

    def to_bytes(self) -> bytes:
        return encode(
            {
                "format": FORMAT,
                "step": self.name.step,
                "generation": self.name.generation,
                "nonce": self.name.nonce,
                "lineage": lineage_json(self.lineage),
                "world_size": self.world_size,
                "data_position": self.data_position,
                "wall_time_s": self.wall_time_s,
                "versions": dict(self.versions),
                "writers": [writer.as_json() for writer in self.writers],
                "tensors": _object((name, entry.pieces()) for name, entry in self.tensors.items()),
                "tree": iter((text_of(self.tree),)),
                **_types_json(self.types),
            }
        )


def without_tensors(manifest: Manifest) -> Manifest:
    """The manifest without its tensors, in its tree neither: small, whatever the model's size."""
    tree = _without_tensors(manifest.tree) or {"dict": {}}
    return dataclasses.replace(manifest, tensors={}, tree=tree, types=())


def _without_tensors(node: Node) -> Node | None:
    """The node; None if it holds only tensors. Lists with tensors are dropped as well, since their
    other items would move."""
    ((kind, content),) = node.items()
    if kind == "tensor":
        return None
    if kind in ("list", "tuple"):
        return None if any(_without_tensors(item) != item for item in content) else node
    if kind not in ("dict", "items"):
        return node
    pairs = content.items() if kind == "dict" else content
    kept = [(key, small) for key, item in pairs if (small := _without_tensors(item)) is not None]
    if content and not kept:
        return None
    return {kind: dict(kept) if kind == "dict" else [list(pair) for pair in kept]}


@dataclass(frozen=True, kw_only=True)
class Part:
    """``part-r-of-W.json``: one writer's record that its file is complete and durable.

    Parts exist only in an attempt; the committer merges all W into the manifest. The part of writer
    0 also holds what all writers share: tree, lineage, data position. Every part holds the hash of
    the list of tensors, so that writers with different models never form one checkpoint. If groups
    of writers hold different keys of one tree, each is a *section*: the ranks that have the same
    tensors, of which the first one's part holds its section's tree.
    """

    name: CheckpointName
    world_size: int
    writer: WriterEntry
    specs_xxh3_128: str
    chunks: ChunkTable
    shared: SharedMetadata | None  # of the first writer of each section only
    section: tuple[int, ...] | None = None  # None: all writers

    def to_bytes(self) -> bytes:
        return encode(
            {
                "format": FORMAT,
                "step": self.name.step,
                "generation": self.name.generation,
                "nonce": self.name.nonce,
                "world_size": self.world_size,
                "writer": self.writer.as_json(),
                "specs_xxh3_128": self.specs_xxh3_128,
                "chunks": _object(
                    (name, _array(chunk.as_text() for chunk in chunks))
                    for name, chunks in self.chunks.items()
                ),
                "shared": None if self.shared is None else self.shared.pieces(),
                **({} if self.section is None else {"section": list(self.section)}),
            }
        )


@dataclass(frozen=True, kw_only=True)
class SharedMetadata:
    """What all writers of a section share, as recorded by its first one."""

    lineage: Lineage
    data_position: Any
    versions: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    tree: Node
    types: Types = ()

    def pieces(self) -> Iterator[str]:
        """The JSON text, in pieces."""
        specs = (
            f'[{json.dumps(spec.name)},"{spec.dtype}",{_integers(spec.shape)}]'
            for spec in self.specs.values()
        )
        return _object(
            (
                ("lineage", (as_text(lineage_json(self.lineage)),)),
                ("data_position", (as_text(self.data_position),)),
                ("versions", (as_text(dict(self.versions)),)),
                ("specs", _array(specs)),
                ("tree", (text_of(self.tree),)),
                *((key, (as_text(types),)) for key, types in _types_json(self.types).items()),
            )
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Summary of a committed checkpoint. ``wall_time_s`` is seconds since 1970."""

    name: str
    step: int
    generation: int
    nonce: str
    lineage: Lineage
    world_size: int
    data_position: Any
    wall_time_s: float
    versions: Mapping[str, str]
    size_bytes: int
    tensor_count: int = field(default=0)


def info_of(manifest: Manifest) -> CheckpointInfo:
    """The summary of a manifest."""
    return CheckpointInfo(
        name=str(manifest.name),
        step=manifest.name.step,
        generation=manifest.name.generation,
        nonce=manifest.name.nonce,
        lineage=manifest.lineage,
        world_size=manifest.world_size,
        data_position=manifest.data_position,
        wall_time_s=manifest.wall_time_s,
        versions=dict(manifest.versions),
        size_bytes=sum(writer.size_bytes for writer in manifest.writers),
        tensor_count=len(manifest.tensors),
    )


def _types_json(types: Types) -> dict[str, Any]:
    return {"types": [list(entry) for entry in types]} if types else {}


def lineage_json(lineage: Lineage) -> list[list[int]]:
    return [[ancestor.generation, ancestor.began_at_step] for ancestor in lineage]


# ----------------------------------------------------------------------------
# Checks that the chunks of a tensor cover each of its elements exactly once.

# Tilings that no straight cut divides (a pinwheel) are compared pairwise. No layout produces large
# ones.
_MAX_PAIRWISE = 2000


def coverage_problem(spec: TensorSpec, chunks: Sequence[Chunk]) -> str | None:
    """What is wrong with the chunks of a tensor, or None."""
    for chunk in chunks:
        count = chunk.place.count if isinstance(chunk.place, Span) else math.prod(chunk.place.shape)
        if chunk.end - chunk.begin != count * spec.element_bytes:
            return "the size of a chunk does not match its number of elements"
    spans = [chunk.place for chunk in chunks if isinstance(chunk.place, Span)]
    regions = [chunk.place for chunk in chunks if isinstance(chunk.place, Region)]
    if spans and regions:
        return "spans and regions are mixed"
    return _regions_problem(spec, regions) if regions else _spans_problem(spec, spans)


def _spans_problem(spec: TensorSpec, spans: list[Span]) -> str | None:
    reached = 0
    for span in sorted(spans, key=lambda s: s.start):
        if span.start > reached:
            return f"elements {reached} to {span.start} are in no chunk"
        if span.start < reached:
            return f"element {span.start} is in two chunks"
        reached += span.count
    if reached < spec.count:
        return f"elements {reached} to {spec.count} are in no chunk"
    return f"its chunks have {reached} elements, not {spec.count}" if reached > spec.count else None


def _regions_problem(spec: TensorSpec, regions: list[Region]) -> str | None:
    for region in regions:
        if len(region.offset) != len(spec.shape) or len(region.shape) != len(spec.shape):
            return "a region and its tensor differ in the number of dimensions"
        if any(o + s > n for o, s, n in zip(region.offset, region.shape, spec.shape, strict=True)):
            return "a region exceeds the bounds of its tensor"
    if sum(math.prod(region.shape) for region in regions) != spec.count:
        return "its regions do not have as many elements as the tensor"
    # The right number of elements and no overlap: each is covered once.
    return _overlap_problem(regions, len(spec.shape))


def _overlap_problem(regions: list[Region], dims: int) -> str | None:
    """Divide along cuts that no region crosses; compare pairwise what cannot be divided."""
    groups = [regions]
    while groups:
        group = groups.pop()
        for dim in range(dims):
            parts = list(_parts(group, dim))
            if len(parts) > 1:
                groups += [part for part in parts if len(part) > 1]
                break
        else:
            if len(group) > _MAX_PAIRWISE:
                return f"{len(group)} of its regions interlock: too many to check for overlap"
            for index, region in enumerate(group):
                if any(region & other for other in group[:index]):
                    return "two of its regions overlap"
    return None


def _parts(regions: list[Region], dim: int) -> Iterator[list[Region]]:
    part: list[Region] = []
    reached = 0
    for region in sorted(regions, key=lambda b: b.offset[dim]):
        if part and region.offset[dim] >= reached:
            yield part
            part = []
        part.append(region)
        reached = max(reached, region.offset[dim] + region.shape[dim])
    yield part


# ----------------------------------------------------------------------------
# Lineage: which checkpoints belong to one training history.
#
# A *generation* is one world of writers; programs that are not elastic have only generation 0. A
# generation starts from a state: the initial one (step 0), a checkpoint, or the memory of a live
# peer, at some step. The *lineage* of a state is the list of (generation, step at which it began),
# oldest first; the last entry is the generation that holds the state. Every checkpoint records it.
#
# Where generation h follows g in a lineage and began at step s, the history left g at s. So a
# checkpoint (g, step) is **on** a lineage if g is in it, the step is not before the start of g
# and, unless g is last, not after the start of its successor. Every other checkpoint of a
# generation up to the last is **abandoned**: its writer continued from it, but this history does
# not include it. Example: generation 1 saves at 100, 200 and 300; 300 is damaged, so generation 2
# begins at 200 and saves at 250. The lineage is ((1, 0), (2, 200)); (1, 300) is abandoned, even if
# it becomes readable again (a network disk recovers).


def as_lineage(pairs: Iterable[Ancestor | tuple[int, int]]) -> Lineage:
    """Validate pairs as a lineage. Raises :class:`ArgumentError`."""
    lineage = tuple(p if isinstance(p, Ancestor) else Ancestor(*p) for p in pairs)
    for older, newer in pairwise(lineage):
        if newer.generation <= older.generation:
            raise ArgumentError(
                f"lineage: generation {newer.generation} follows {older.generation}; "
                "generations must increase"
            )
    if any(a.generation < 0 or a.began_at_step < 0 for a in lineage):
        raise ArgumentError("lineage: a generation or step is negative")
    return lineage


def derive_lineage(origin: CheckpointInfo | None, generation: int) -> Lineage:
    """The lineage of ``generation``, which starts from ``origin`` (None: from the initial state).

    >>> derive_lineage(None, 1)
    (Ancestor(generation=1, began_at_step=0),)
    """
    if origin is None:
        return (Ancestor(generation, 0),)
    if origin.generation >= generation:
        # Programs that are not elastic stay in one generation: the history continues.
        return origin.lineage
    before = origin.lineage or (Ancestor(origin.generation, 0),)
    return (*before, Ancestor(generation, origin.step))


def why_abandoned(name: CheckpointName, lineage: Lineage) -> str | None:
    """Why a checkpoint is not on a lineage; None if it is, or if the lineage is empty."""
    if not lineage:
        return None
    for ancestor, successor in zip(lineage, (*lineage[1:], None), strict=True):
        if ancestor.generation != name.generation:
            continue
        if name.step < ancestor.began_at_step:
            return f"generation {name.generation} began after it, at step {ancestor.began_at_step}"
        if successor is not None and name.step > successor.began_at_step:
            return (
                f"abandoned: generation {successor.generation} began at step "
                f"{successor.began_at_step} of generation {name.generation}, before this one"
            )
        return None
    return f"abandoned: generation {name.generation} is not in the lineage"


# ----------------------------------------------------------------------------
# Parses untrusted manifests and parts.
#
# Everything is checked before anything is allocated or opened: types, ranges, file names, that the
# chunks of a tensor cover each element once, and that no two chunks share a byte of a file. The
# last two checks limit what a loader allocates to the size of the existing files.
#
# What does not depend on the text is checked on the parsed manifest (:func:`check_content`), and by
# a committer on the merged one: it never commits what a loader would reject.

MAX_DIMENSIONS = 64
_MAX_INT = 2**62
_HASH = re.compile(r"[0-9a-f]{32}")

_COMMON_FIELDS = {"format", "step", "generation", "nonce", "world_size"}
_MANIFEST_FIELDS = _COMMON_FIELDS | {
    *("lineage", "data_position", "wall_time_s", "versions"),
    *("writers", "tensors", "tree"),
}
_PART_FIELDS = _COMMON_FIELDS | {"writer", "specs_xxh3_128", "chunks", "shared"}
_SHARED_FIELDS = {"lineage", "data_position", "versions", "specs", "tree"}


def parse_manifest(data: bytes, file: str) -> Manifest:
    """A manifest from its bytes. Raises :class:`CorruptCheckpoint` or
    :class:`UnsupportedFormat`."""
    manifest = _Parser(file).manifest(data)
    check_content(manifest, file)
    return manifest


def parse_without_tensors(data: bytes, file: str) -> Manifest:
    """A manifest from its bytes, :func:`without_tensors`: ten times faster, since neither a tensor
    nor its chunks are checked. Raises like :func:`parse_manifest`."""
    parser = _Parser(file)
    manifest = parser.manifest(data, parser.names)
    parser.tree(manifest.tree, manifest.tensors)
    return without_tensors(manifest)


def parse_part(data: bytes, file: str) -> Part:
    """A part from its bytes. Raises :class:`CorruptCheckpoint` or :class:`UnsupportedFormat`."""
    return _Parser(file).part(data)


def check_content(manifest: Manifest, file: str) -> None:
    """Raise :class:`CorruptCheckpoint` if chunks, files, shapes and tree do not fit together."""
    sizes = {writer.file: (writer.header_bytes, writer.size_bytes) for writer in manifest.writers}
    ranges: dict[str, list[tuple[int, int, str]]] = {file: [] for file in sizes}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            low, high = sizes.get(chunk.file, (0, 0))
            if not low <= chunk.begin < chunk.end <= high:
                reason = f"bytes {chunk.begin} to {chunk.end} are not in {chunk.file}"
                raise CorruptCheckpoint(reason, file=file, tensor=name)
            ranges[chunk.file].append((chunk.begin, chunk.end, name))
        problem = shape_problem(tensor.spec) or coverage_problem(tensor.spec, tensor.chunks)
        if problem is not None:
            raise CorruptCheckpoint(problem, file=file, tensor=name)
    for data_file, chunks in ranges.items():
        chunks.sort()  # quick, without the GIL for long: a writer's chunks are nearly in order
        for (_, end, first), (begin, _, second) in pairwise(chunks):
            if begin < end:
                reason = f"its bytes in {data_file} overlap those of {first!r}"
                raise CorruptCheckpoint(reason, file=file, tensor=second)
    if (problem := check_tree(manifest.tree, manifest.tensors)) is not None:
        raise CorruptCheckpoint(problem, file=file)


def shape_problem(spec: TensorSpec) -> str | None:
    """What is wrong with the shape of a tensor, or None."""
    # Zeros count as 1: [0, 2**62, 2**62] would pass here and overflow in torch.
    is_large = math.prod([max(size, 1) for size in spec.shape]) > _MAX_INT
    return "the shape is too large" if is_large or len(spec.shape) > MAX_DIMENSIONS else None


class _Parser:
    """Parses one document; holds the file name for error messages."""

    def __init__(self, file: str) -> None:
        self._file = file

    def manifest(self, data: bytes, tensors: Callable[[Scanner], Any] | None = None) -> Manifest:
        """A manifest, of which the tensors and the tree are unchecked. ``tensors`` reads them."""
        readers = {"format": self._format, "tensors": tensors or self._tensors, "tree": self._node}
        fields = decode(data, self._file, readers)
        self._keys(fields, _MANIFEST_FIELDS | (fields.keys() & {"types"}))
        name = self._name(fields)
        world_size = self._world_size(fields["world_size"])
        writers = tuple(self._writer(w, world_size) for w in self._list(fields["writers"]))
        if [writer.rank for writer in writers] != list(range(world_size)):
            self._fail("there is not exactly one writer per rank")
        return Manifest(
            name=name,
            lineage=self._lineage(fields["lineage"]),
            world_size=world_size,
            data_position=fields["data_position"],
            wall_time_s=self._time(fields["wall_time_s"]),
            versions=self._versions(fields["versions"]),
            writers=writers,
            tensors=fields["tensors"],
            tree=fields["tree"],
            types=self._types(fields.get("types", [])),
        )

    def part(self, data: bytes) -> Part:
        readers = {"format": self._format, "chunks": self._chunks, "shared": self._shared}
        fields = decode(data, self._file, readers)
        self._keys(fields, _PART_FIELDS | (fields.keys() & {"section"}))
        world_size = self._world_size(fields["world_size"])
        return Part(
            name=self._name(fields),
            world_size=world_size,
            writer=self._writer(fields["writer"], world_size),
            specs_xxh3_128=self._hash(fields["specs_xxh3_128"]),
            chunks=fields["chunks"],
            shared=fields["shared"],
            section=self._section(fields["section"], world_size) if "section" in fields else None,
        )

    def _section(self, value: object, world_size: int) -> tuple[int, ...]:
        ranks = tuple(self._int(rank, "a rank of a section") for rank in self._list(value))
        if not ranks or list(ranks) != sorted(set(ranks)) or ranks[-1] >= world_size:
            self._fail("a section is not an ordered list of ranks")
        return ranks

    def _shared(self, scanner: Scanner) -> SharedMetadata | None:
        if scanner.begins("null"):
            scanner.value()
            return None
        readers = {"specs": self._specs, "tree": self._node}
        fields = scanner.object(readers)
        self._keys(fields, _SHARED_FIELDS | (fields.keys() & {"types"}))
        return SharedMetadata(
            lineage=self._lineage(fields["lineage"]),
            data_position=fields["data_position"],
            versions=self._versions(fields["versions"]),
            specs=fields["specs"],
            tree=self.tree(fields["tree"], fields["specs"]),
            types=self._types(fields.get("types", [])),
        )

    # --- tensors

    @staticmethod
    def names(scanner: Scanner) -> dict[str, None]:
        """The names of tensors; what they map to is skipped."""
        names: dict[str, None] = {}
        for name in scanner.each_key():
            scanner.value()
            names[name] = None
        return names

    def _tensors(self, scanner: Scanner) -> TensorTable:
        specs, chunks = SpecTable(), ChunkTable()
        for name in scanner.each_key():
            entry = self._tensor(name, scanner.value())
            specs.add(entry.spec)
            chunks.add(name, entry.chunks)
        return TensorTable(specs, chunks)

    def _chunks(self, scanner: Scanner) -> ChunkTable:
        chunks = ChunkTable()
        for name in scanner.each_key():
            chunks.add(name, [self._chunk(name, item) for item in self._list(scanner.value())])
        return chunks

    def _specs(self, scanner: Scanner) -> SpecTable:
        specs = SpecTable()
        for _ in scanner.each_item():
            item = scanner.value()
            if not isinstance(item, list) or len(item) != 3 or not isinstance(item[0], str):
                self._fail("a tensor's description is malformed")
            specs.add(self._spec(*item))
        return specs

    def _node(self, scanner: Scanner) -> Any:
        """A node of the tree, unchecked."""
        if not scanner.begins('{"dict":'):
            return scanner.value()

        def read(scanner: Scanner) -> Any:
            return {key: self._node(scanner) for key in scanner.each_key()}

        return scanner.object({"dict": read})

    def _tensor(self, name: str, value: object) -> TensorEntry:
        fields = self._keys(value, ("dtype", "shape", "chunks"), tensor=name)
        spec = self._spec(name, fields["dtype"], fields["shape"])
        chunks = tuple([self._chunk(name, chunk) for chunk in self._list(fields["chunks"])])
        return TensorEntry(spec, chunks)

    def _spec(self, name: str, dtype: object, shape: object) -> TensorSpec:
        if not isinstance(dtype, str):
            self._fail("the dtype is not a string", name)
        if dtype not in BY_NAME:
            raise UnsupportedFormat(
                f"{self._file}: tensor {name!r} has the type {dtype[:40]!r}, "
                "which the installed versions of torch and this package do not support",
                hint="Upgrade torch and this package.",
            )
        spec = TensorSpec(
            name, dtype, tuple([self._int(size, "a dimension") for size in self._list(shape)])
        )
        if (problem := shape_problem(spec)) is not None:
            self._fail(problem, name)
        return spec

    def _chunk(self, tensor: str, value: object) -> Chunk:
        if not isinstance(value, dict) or ("span" in value) == ("box" in value):
            self._fail("a chunk needs exactly one of span and box", tensor)
        kind = "span" if "span" in value else "box"
        fields = self._keys(value, ("file", "bytes", kind, "xxh3_128"), tensor=tensor)
        begin, end = self._pair(fields["bytes"], tensor)
        if not isinstance(fields["file"], str):
            self._fail("a chunk's file is not a name", tensor)
        return Chunk(
            file=fields["file"],
            begin=self._int(begin, "a byte offset"),
            end=self._int(end, "a byte offset"),
            place=self._span(fields["span"], tensor)
            if kind == "span"
            else self._region(value, tensor),
            xxh3_128=self._hash(fields["xxh3_128"]),
        )

    def _span(self, value: object, tensor: str) -> Span:
        start, count = self._pair(value, tensor)
        return Span(self._int(start, "a span"), self._int(count, "a span"))

    def _region(self, value: dict[str, Any], tensor: str) -> Region:
        offset, shape = (self._list(part) for part in self._pair(value["box"], tensor))
        return Region(
            tuple(self._int(item, "a box") for item in offset),
            tuple(self._int(item, "a box") for item in shape),
        )

    def tree(self, tree: Any, tensors: Mapping[str, object]) -> dict[str, Any]:
        problem = check_tree(tree, tensors)
        if problem is not None:
            self._fail(problem)
        assert isinstance(tree, dict)
        return tree

    def _types(self, value: object) -> Types:
        types = self._list(value)
        for entry in types:
            path, name, _ = entry if isinstance(entry, list) and len(entry) == 3 else ([], 0, 0)
            is_path = isinstance(path, list) and len(path) <= MAX_DEPTH
            if not (is_path and isinstance(name, str)) or any(
                type(key) not in (str, int) for key in path
            ):
                self._fail("the type of a value is malformed")
        return types

    # --- other fields

    def _format(self, scanner: Scanner) -> object:
        version = scanner.value()
        if type(version) is int and version > FORMAT:
            raise UnsupportedFormat(
                f"{self._file} has format {version}; this version reads up to {FORMAT}",
                hint="Upgrade this package, or load an older checkpoint.",
            )
        if version != FORMAT or type(version) is not int:
            self._fail("unknown format version")
        return version

    def _name(self, fields: dict[str, Any]) -> CheckpointName:
        nonce = fields["nonce"]
        if not isinstance(nonce, str):
            self._fail("the nonce is not a string")
        step = self._int(fields["step"], "the step")
        generation = self._int(fields["generation"], "the generation")
        try:
            return CheckpointName(step, generation, nonce)
        except ArgumentError as error:
            self._fail(error.message[:200])

    def _writer(self, value: object, world_size: int) -> WriterEntry:
        keys = ("rank", "file", "size_bytes", "header_bytes", "header_xxh3_128", "wall_time_s")
        fields = self._keys(value, keys)
        rank = self._int(fields["rank"], "a rank")
        # The name is compared, never used: a manifest cannot name a path elsewhere.
        if rank >= world_size or fields["file"] != writer_file(rank, world_size):
            self._fail("a writer's file does not have the expected name")
        size = self._int(fields["size_bytes"], "a size")
        header = self._int(fields["header_bytes"], "a size")
        if header > size:
            self._fail("a header is larger than its file")
        return WriterEntry(
            rank=rank,
            file=writer_file(rank, world_size),
            size_bytes=size,
            header_bytes=header,
            header_xxh3_128=self._hash(fields["header_xxh3_128"]),
            wall_time_s=self._time(fields["wall_time_s"]),
        )

    def _lineage(self, value: object) -> Lineage:
        lineage = []
        for item in self._list(value):
            generation, step = self._pair(item)
            lineage.append(
                Ancestor(self._int(generation, "the lineage"), self._int(step, "the lineage"))
            )
        for older, newer in pairwise(lineage):
            if newer.generation <= older.generation:
                self._fail("generations of the lineage do not increase")
        return tuple(lineage)

    def _versions(self, value: object) -> dict[str, str]:
        versions = self._dict(value)
        if not all(isinstance(version, str) for version in versions.values()):
            self._fail("a version is not a string")
        return versions

    def _world_size(self, value: object) -> int:
        size = self._int(value, "the world size")
        if not 1 <= size <= MAX_WORLD_SIZE:
            self._fail("the world size is out of range")
        return size

    def _time(self, value: object) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            self._fail("a time is not a finite number")
        return float(value)  # type: ignore[arg-type]

    def _hash(self, value: object) -> str:
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            self._fail("a hash is not 32 hex digits")
        return value

    def _int(self, value: object, what: str) -> int:
        if type(value) is not int or not 0 <= value <= _MAX_INT:
            self._fail(f"{what} is not a number from 0 to 2^62")
        return value

    def _pair(self, value: object, tensor: str | None = None) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            self._fail("expected a list of two values", tensor)
        return value[0], value[1]

    def _list(self, value: object) -> list[Any]:
        if not isinstance(value, list):
            self._fail("expected a list")
        return value

    def _dict(self, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._fail("expected an object")
        return value

    def _keys(
        self, value: object, keys: Iterable[str], *, tensor: str | None = None
    ) -> dict[str, Any]:
        fields = self._dict(value)
        if fields.keys() != set(keys):
            wrong = sorted(fields.keys() ^ set(keys))
            self._fail(f"fields missing or unknown: {', '.join(wrong)[:200]}", tensor)
        return fields

    def _fail(self, reason: str, tensor: str | None = None) -> NoReturn:
        raise CorruptCheckpoint(reason, file=self._file, tensor=tensor)
