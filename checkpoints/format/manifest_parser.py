"""Parses untrusted manifests and parts.

Everything is checked before anything is allocated or opened: types, ranges, file names, that the
chunks of a tensor cover each element once, and that no two chunks share a byte of a file. The last
two checks limit what a loader allocates to the size of the existing files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NoReturn

from checkpoints.errors import ArgumentError, CorruptCheckpoint, UnsupportedFormat
from checkpoints.format.checksummed_json import decode
from checkpoints.format.coverage import coverage_problem
from checkpoints.format.manifest import (
    FORMAT,
    Ancestor,
    Chunk,
    Lineage,
    Manifest,
    Part,
    SharedMetadata,
    TensorEntry,
    WriterEntry,
)
from checkpoints.format.names import MAX_WORLD_SIZE, CheckpointName, writer_file
from checkpoints.format.state_tree import check_tree
from checkpoints.tensors.dtypes import BY_NAME
from checkpoints.tensors.partition import TensorSpec
from checkpoints.tensors.regions import Region, Span

MAX_DIMENSIONS = 64
_MAX_INT = 2**62
_HASH = re.compile(r"[0-9a-f]{32}")

_COMMON_FIELDS = {"format", "step", "generation", "nonce", "world_size"}
_MANIFEST_FIELDS = _COMMON_FIELDS | {
    *("lineage", "data_position", "wall_time_s", "versions"),
    *("writers", "tensors", "tree"),
}
_PART_FIELDS = _COMMON_FIELDS | {"writer", "specs_xxh3_128", "chunks", "shared"}


def parse_manifest(data: bytes, file: str) -> Manifest:
    """A manifest from its bytes. Raises :class:`CorruptCheckpoint` or
    :class:`UnsupportedFormat`."""
    return _Parser(file).manifest(decode(data, file))


def parse_part(data: bytes, file: str) -> Part:
    """A part from its bytes. Raises :class:`CorruptCheckpoint` or :class:`UnsupportedFormat`."""
    return _Parser(file).part(decode(data, file))


class _Parser:
    """Parses one document; holds the file name for error messages."""

    def __init__(self, file: str) -> None:
        self._file = file

    def manifest(self, fields: dict[str, Any]) -> Manifest:
        self._format(fields, _MANIFEST_FIELDS)
        name = self._name(fields)
        world_size = self._world_size(fields["world_size"])
        writers = tuple(self._writer(w, world_size) for w in self._list(fields["writers"]))
        if [writer.rank for writer in writers] != list(range(world_size)):
            self._fail("there is not exactly one writer per rank")
        sizes = {writer.file: (writer.header_bytes, writer.size_bytes) for writer in writers}
        tensors = {
            key: self._tensor(key, value, sizes)
            for key, value in self._dict(fields["tensors"]).items()
        }
        self._check_disjoint(tensors)
        return Manifest(
            name=name,
            lineage=self._lineage(fields["lineage"]),
            world_size=world_size,
            data_position=fields["data_position"],
            wall_time_s=self._time(fields["wall_time_s"]),
            versions=self._versions(fields["versions"]),
            writers=writers,
            tensors=tensors,
            tree=self._tree(fields["tree"], tensors),
        )

    def part(self, fields: dict[str, Any]) -> Part:
        self._format(fields, _PART_FIELDS | (fields.keys() & {"section"}))
        world_size = self._world_size(fields["world_size"])
        writer = self._writer(fields["writer"], world_size)
        shared = None if fields["shared"] is None else self._shared(fields["shared"])
        chunks = {
            key: tuple(self._chunk(key, c) for c in self._list(value))
            for key, value in self._dict(fields["chunks"]).items()
        }
        return Part(
            name=self._name(fields),
            world_size=world_size,
            writer=writer,
            specs_xxh3_128=self._hash(fields["specs_xxh3_128"]),
            chunks=chunks,
            shared=shared,
            section=self._section(fields["section"], world_size) if "section" in fields else None,
        )

    def _section(self, value: object, world_size: int) -> tuple[int, ...]:
        ranks = tuple(self._int(rank, "a rank of a section") for rank in self._list(value))
        if not ranks or list(ranks) != sorted(set(ranks)) or ranks[-1] >= world_size:
            self._fail("a section is not an ordered list of ranks")
        return ranks

    def _shared(self, value: object) -> SharedMetadata:
        fields = self._keys(value, ("lineage", "data_position", "versions", "specs", "tree"))
        specs = []
        for item in self._list(fields["specs"]):
            if not isinstance(item, list) or len(item) != 3 or not isinstance(item[0], str):
                self._fail("a tensor's description is malformed")
            specs.append(self._spec(item[0], item[1], item[2]))
        return SharedMetadata(
            lineage=self._lineage(fields["lineage"]),
            data_position=fields["data_position"],
            versions=self._versions(fields["versions"]),
            specs=tuple(specs),
            tree=self._tree(fields["tree"], {spec.name: spec for spec in specs}),
        )

    # --- tensors

    def _tensor(
        self, name: str, value: object, files: Mapping[str, tuple[int, int]]
    ) -> TensorEntry:
        fields = self._keys(value, ("dtype", "shape", "chunks"), tensor=name)
        spec = self._spec(name, fields["dtype"], fields["shape"])
        chunks = tuple(self._chunk(name, chunk) for chunk in self._list(fields["chunks"]))
        for chunk in chunks:
            low, high = files.get(chunk.file, (0, 0))
            if not low <= chunk.begin < chunk.end <= high:
                self._fail(f"bytes {chunk.begin} to {chunk.end} are not in {chunk.file}", name)
        problem = coverage_problem(spec, chunks)
        if problem is not None:
            self._fail(problem, name)
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
        sizes = tuple(self._int(size, "a dimension") for size in self._list(shape))
        # Zeros count as 1: [0, 2**62, 2**62] would pass here and overflow in torch.
        if len(sizes) > MAX_DIMENSIONS or math.prod(max(size, 1) for size in sizes) > _MAX_INT:
            self._fail("the shape is too large", name)
        return TensorSpec(name, dtype, sizes)

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

    def _check_disjoint(self, tensors: Mapping[str, TensorEntry]) -> None:
        ranges = sorted(
            (chunk.file, chunk.begin, chunk.end, tensor.spec.name)
            for tensor in tensors.values()
            for chunk in tensor.chunks
        )
        for (file, _, end, first), (other, begin, _, second) in pairwise(ranges):
            if file == other and begin < end:
                self._fail(f"its bytes in {file} overlap those of {first!r}", second)

    def _tree(self, tree: Any, tensors: Mapping[str, object]) -> dict[str, Any]:
        problem = check_tree(tree, tensors)
        if problem is not None:
            self._fail(problem)
        assert isinstance(tree, dict)
        return tree

    # --- other fields

    def _format(self, fields: dict[str, Any], known: Iterable[str]) -> None:
        version = fields.get("format")
        if type(version) is int and version > FORMAT:
            raise UnsupportedFormat(
                f"{self._file} has format {version}; this version reads up to {FORMAT}",
                hint="Upgrade this package, or load an older checkpoint.",
            )
        if version != FORMAT or type(version) is not int:
            self._fail("unknown format version")
        self._keys(fields, known)

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
