"""The manifest (``manifest.json``) and the parts it is merged from, as frozen dataclasses.

``manifest.schema.json`` in this package describes the format for other readers;
:mod:`checkpoints.format.manifest_parser` reads it without trusting its content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints.format.checksummed_json import encode
from checkpoints.format.names import CheckpointName
from checkpoints.format.state_tree import Node
from checkpoints.tensors.partition import TensorSpec
from checkpoints.tensors.regions import Extent, Span

FORMAT = 1


@dataclass(frozen=True)
class Ancestor:
    """One generation of a lineage, and the step at which it began."""

    generation: int
    began_at_step: int


Lineage = tuple[Ancestor, ...]


@dataclass(frozen=True)
class Chunk:
    """Bytes ``[begin, end)`` of a writer's file, their place in the tensor, and their hash."""

    file: str
    begin: int
    end: int
    place: Extent
    xxh3_128: str

    def as_json(self) -> dict[str, Any]:
        place: dict[str, Any]
        if isinstance(self.place, Span):
            place = {"span": [self.place.start, self.place.count]}
        else:
            place = {"box": [list(self.place.offset), list(self.place.shape)]}
        return {
            "file": self.file,
            "bytes": [self.begin, self.end],
            **place,
            "xxh3_128": self.xxh3_128,
        }


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor and the chunks that cover each of its elements once."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "dtype": self.spec.dtype,
            "shape": list(self.spec.shape),
            "chunks": [chunk.as_json() for chunk in self.chunks],
        }


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
                "tensors": {name: tensor.as_json() for name, tensor in self.tensors.items()},
                "tree": self.tree,
            }
        )


def without_tensors(manifest: Manifest) -> Manifest:
    """The manifest without its tensors, in its tree neither: small, whatever the model's size."""
    tree = _without_tensors(manifest.tree) or {"dict": {}}
    return dataclasses.replace(manifest, tensors={}, tree=tree)


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
    chunks: Mapping[str, tuple[Chunk, ...]]
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
                "chunks": {
                    name: [chunk.as_json() for chunk in chunks]
                    for name, chunks in self.chunks.items()
                },
                "shared": None if self.shared is None else self.shared.as_json(),
                **({} if self.section is None else {"section": list(self.section)}),
            }
        )


@dataclass(frozen=True, kw_only=True)
class SharedMetadata:
    """What all writers of a section share, as recorded by its first one."""

    lineage: Lineage
    data_position: Any
    versions: Mapping[str, str]
    specs: tuple[TensorSpec, ...]
    tree: Node

    def as_json(self) -> dict[str, Any]:
        return {
            "lineage": lineage_json(self.lineage),
            "data_position": self.data_position,
            "versions": dict(self.versions),
            "specs": [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs],
            "tree": self.tree,
        }


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


def lineage_json(lineage: Lineage) -> list[list[int]]:
    return [[ancestor.generation, ancestor.began_at_step] for ancestor in lineage]
