"""Plans a load: matches saved and live tensors by path, and selects the bytes to read."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.commit import read_manifest
from checkpoints.errors import LoadError, StateMismatch
from checkpoints.manifest import Manifest, digest
from checkpoints.reader import MappedCheckpoint, TensorBuffer, into_buffers, read_chunks
from checkpoints.storage import Storage
from checkpoints.tensors import BY_NAME, Region, full_region, is_dtensor, local_of, local_regions
from checkpoints.tree import (
    has_plain_bytes,
    live_tensors,
    memory_identity,
    tensor_leaves,
    unflatten,
)
from checkpoints.values import typed_form

if TYPE_CHECKING:
    import torch

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Match:
    """Which saved and live tensors match, by path."""

    fitting: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    mismatched: tuple[str, ...]

    def without(self, why: Mapping[str, str]) -> Match:
        """The match if these paths cannot be loaded into, for these reasons."""
        return dataclasses.replace(
            self,
            fitting=tuple(path for path in self.fitting if path not in why),
            mismatched=(*self.mismatched, *map(_unloadable, why, why.values())),
        )

    def unmatched(self) -> tuple[str, ...]:
        return (
            *(f"{path}: missing in the checkpoint" for path in self.missing),
            *(f"{path}: only in the checkpoint" for path in self.extra),
            *self.mismatched,
        )


@dataclass(frozen=True)
class LoadPlan:
    """A validated load: which part of each tensor is needed, and where it goes."""

    storage: Storage
    manifest: Manifest
    live: Mapping[str, torch.Tensor]
    leaves: Mapping[str, str]  # path to name
    match: Match
    is_partial: bool
    into_live: bool  # copy into live tensors; else all is returned
    untyped: Mapping[tuple[object, ...], str]  # values whose type cannot be restored, and why

    def state(self, leaf: Callable[[str, str], object]) -> Any:
        """The saved state; ``leaf(path, name)`` supplies each tensor."""
        types = [entry for entry in self.manifest.types if tuple(entry[0]) not in self.untyped]
        return typed_form(unflatten(self.manifest.tree, leaf), types)

    def unmatched(self) -> tuple[str, ...]:
        """What is not loaded as it was saved, each with the reason."""
        return (*(self.match.unmatched() if self.is_partial else ()), *self.untyped.values())

    def mapped_files(self) -> MappedCheckpoint | None:
        """The mapped files, if the load copies from them directly into live tensors; else None."""
        return MappedCheckpoint.of(self.storage, self.manifest) if self.into_live else None

    def fingerprint(self) -> str:
        """A digest of what must be equal on all ranks of a collective load."""
        return digest(
            json.dumps([digest(self.manifest.to_bytes()), sorted(self.complete)]).encode()
        )

    @functools.cached_property
    def complete(self) -> frozenset[str]:
        """The tensors that this rank needs in full, by name: all but those that it loads only into
        DTensors."""
        fitting = set(self.match.fitting)
        needed: set[str] = set()

        def visit(path: str, name: str) -> None:
            if path not in fitting or not is_dtensor(self.live[path]):
                needed.add(name)

        unflatten(self.manifest.tree, visit)
        return frozenset(needed)

    def buffers(self) -> dict[str, TensorBuffer]:
        """Fresh memory for the needed part of each tensor."""
        live = self._live_regions()
        # A tensor without a leaf is not needed; only crafted manifests have one.
        return {
            name: TensorBuffer(
                tensor.spec, None if name in self.complete else _regions(live.get(name, ()))
            )
            for name, tensor in self.manifest.tensors.items()
        }

    def live_memory(self) -> dict[str, TensorBuffer]:
        """The live tensors' own memory; fresh memory only for tensors that are returned in
        addition."""
        fitting, live = set(self.match.fitting), self._live_regions()
        returned = {name for path, name in self.leaves.items() if path not in fitting}
        return {
            name: TensorBuffer(tensor.spec)
            if name in returned
            else TensorBuffer.over(tensor.spec, live.get(name, ()))
            for name, tensor in self.manifest.tensors.items()
        }

    def _live_regions(self) -> dict[str, list[tuple[Region, torch.Tensor]]]:
        blocks: dict[str, list[tuple[Region, torch.Tensor]]] = defaultdict(list)
        for path in self.match.fitting:
            blocks[self.leaves[path]] += live_regions(self.live[path], path)
        return blocks


def prepare(
    storage: Storage, name: str, into: object, strict: bool, only: str | None = None
) -> LoadPlan:
    manifest = read_manifest(storage, name)
    if only is not None:
        manifest = _part_of(manifest, only)
    untyped = _untyped(manifest, strict)
    leaves = tensor_leaves(manifest.tree)
    if into is not None and len(set(leaves.values())) < len(manifest.tensors):
        _check_paths(manifest)
    live = {} if into is None else live_tensors(into)
    match = _match(manifest, leaves, live)
    if untied := _wrongly_tied(storage, manifest, leaves, {p: live[p] for p in match.fitting}):
        match = match.without(untied)
    differs = into is not None and bool(match.missing or match.extra or match.mismatched)
    if differs and strict:
        raise StateMismatch(
            name, missing=match.missing, extra=match.extra, mismatched=match.mismatched
        )
    return LoadPlan(storage, manifest, live, leaves, match, differs, into is not None, untyped)


def _untyped(manifest: Manifest, strict: bool) -> dict[tuple[object, ...], str]:
    """The values whose type cannot be restored in this process, with the reasons. Found before
    anything is changed. Raises LoadError with ``strict``."""
    if not manifest.types:
        return {}
    failed: list[tuple[tuple[object, ...], str]] = []
    typed_form(unflatten(manifest.tree, lambda path, name: None), manifest.types, failed)
    if failed and strict:
        raise LoadError(
            f"{manifest.name}: {failed[0][1]}",
            hint="Import the module of its class, or pass strict=False to get the plain value.",
        )
    return dict(failed)


def _part_of(manifest: Manifest, key: str) -> Manifest:
    """The manifest without the other keys of the saved state. Raises StateMismatch without it."""
    part = manifest.tree.get("dict", {}).get(key)
    if part is None:
        raise StateMismatch(str(manifest.name), missing=(key,), extra=(), mismatched=())
    tree = {"dict": {key: part}}
    types = [entry for entry in manifest.types if entry[0][:1] == [key]]
    needed = set(tensor_leaves(tree).values())
    tensors = {name: entry for name, entry in manifest.tensors.items() if name in needed}
    return dataclasses.replace(manifest, tree=tree, types=types, tensors=tensors)


def _check_paths(manifest: Manifest) -> None:
    """Raise StateMismatch if two saved tensors have one path. Earlier versions saved such states:
    a dict with an int key and a str key of the same text."""
    seen: dict[str, str] = {}

    def visit(path: str, name: str) -> None:
        if seen.setdefault(path, name) != name:
            both = f"{path} (two saved tensors have this path: load without into)"
            raise StateMismatch(str(manifest.name), missing=(), extra=(), mismatched=(both,))

    unflatten(manifest.tree, visit)


def live_regions(live: torch.Tensor, path: str) -> Sequence[tuple[Region, torch.Tensor]]:
    """The regions of a live tensor that this rank holds, each with its memory."""
    return (
        local_regions(live, path)
        if is_dtensor(live)
        else ((full_region(tuple(live.shape)), live.detach()),)
    )


def _regions(blocks: Iterable[tuple[Region, torch.Tensor]]) -> list[Region]:
    return list(dict.fromkeys(region for region, _ in blocks))


def _match(
    manifest: Manifest, leaves: Mapping[str, str], live: Mapping[str, torch.Tensor]
) -> Match:
    fitting, mismatched = [], []
    read_only = _read_only_memory() if live else []
    for path, tensor in live.items():
        if path not in leaves:
            continue
        spec = manifest.tensors[leaves[path]].spec
        saved = (spec.shape, BY_NAME[spec.dtype].torch)
        if why := _why_unwritable(tensor, read_only):
            mismatched.append(_unloadable(path, why))
        elif (tuple(tensor.shape), tensor.dtype) == saved:
            fitting.append(path)
        else:
            mismatched.append(
                f"{path} (saved {_shape(*saved)}, here {_shape(tuple(tensor.shape), tensor.dtype)})"
            )
    return Match(
        fitting=tuple(fitting),
        missing=tuple(path for path in live if path not in leaves),
        extra=tuple(path for path in leaves if path not in live),
        mismatched=tuple(mismatched),
    )


def _unloadable(path: str, why: str) -> str:
    return f"{path} ({why}: it cannot be loaded into)"


def _wrongly_tied(
    storage: Storage,
    manifest: Manifest,
    leaves: Mapping[str, str],
    live: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Live tensors that are one, of which the checkpoint has two with different values, each with
    the reason. The values of one of them would be lost."""
    at: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for path, tensor in live.items():
        if tensor.numel():
            at[memory_identity(tensor)].append(path)
    why: dict[str, str] = {}
    for first, *others in at.values():
        for path in others:
            if not _are_equal(storage, manifest, leaves[first], leaves[path]):
                why[first] = f"the same memory as {path}, which was saved with other values"
                why[path] = f"the same memory as {first}, which was saved with other values"
    return why


def _are_equal(storage: Storage, manifest: Manifest, name: str, other: str) -> bool:
    """Whether two saved tensors of one shape have the same bytes."""
    import torch

    if name == other:
        return True
    hashes, others = (
        {chunk.place: chunk.xxh3_128 for chunk in manifest.tensors[each].chunks}
        for each in (name, other)
    )
    if hashes.keys() == others.keys():
        return hashes == others
    # Several writers have divided them at different elements.
    entries = [manifest.tensors[each] for each in (name, other)]
    buffers = {entry.spec.name: TensorBuffer(entry.spec) for entry in entries}
    target, done = into_buffers(buffers)
    items = [(entry, chunk) for entry in entries for chunk in entry.chunks]
    read_chunks(storage, manifest, items, target, headers=(), done=done)
    first, second = (buffers[each].tensor.reshape(-1).view(torch.uint8) for each in (name, other))
    return torch.equal(first, second)


def _read_only_memory() -> list[tuple[int, int]]:
    """The addresses of this process's memory that cannot be written, in order; empty if unknown. A
    copy into a file that is mapped for reading would end the process (SIGSEGV)."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=2) for line in lines]  # proc_pid_maps(5)
    ranges = [place.split("-") for place, permissions, _ in fields if permissions[1] != "w"]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def _why_unwritable(tensor: torch.Tensor, read_only: Sequence[tuple[int, int]]) -> str:
    """Why values cannot be copied into a live tensor; "" if they can."""
    local = local_of(tensor) if is_dtensor(tensor) else tensor
    if local.is_meta:
        return "on the meta device"
    if not has_plain_bytes(local):
        return f"a {type(local).__qualname__} without memory of its own"
    steps = [(step, n) for n, step in zip(local.shape, local.stride(), strict=True) if n > 1]
    if local.numel() and _overlap(steps):
        return "expanded, several elements share memory"
    if local.numel() and local.device.type == "cpu":
        begin = local.data_ptr()
        end = begin + (1 + sum((n - 1) * step for step, n in steps)) * local.element_size()
        before = bisect.bisect_left(read_only, (end, 0))  # the ranges that begin before its end
        if before and read_only[before - 1][1] > begin:
            return "in memory that is mapped for reading only"
    return ""


def _overlap(steps: Sequence[tuple[int, int]]) -> bool:
    """Whether two elements of a tensor share memory. ``steps``: stride and size of each dimension
    of at least two elements."""
    import torch

    reach = 0
    for step, count in sorted(steps):
        if step <= reach:  # the dimensions are interleaved
            offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
            for each, size in steps:
                of_dimension = each * torch.arange(size, device="cpu")
                offsets = (offsets[:, None] + of_dimension).reshape(-1)
            return bool((offsets.sort().values.diff() == 0).any())
        reach += (count - 1) * step
    return False


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
