"""What a load needs of each tensor, and where it goes: saved and live tensors matched by path."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpoints.catalog.manifests import read_manifest
from checkpoints.errors import StateMismatch
from checkpoints.format.checksummed_json import digest
from checkpoints.format.manifest import Manifest
from checkpoints.format.state_tree import live_tensors, tensor_leaves
from checkpoints.loading.buffers import TensorBuffer
from checkpoints.loading.mapped_checkpoint import MappedCheckpoint
from checkpoints.storage.protocol import Storage
from checkpoints.tensors.dtensors import is_dtensor, local_regions
from checkpoints.tensors.dtypes import BY_NAME
from checkpoints.tensors.regions import Region, full_region


@dataclass(frozen=True)
class Match:
    """How saved and live tensors fit, by path."""

    fitting: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    mismatched: tuple[str, ...]

    def unmatched(self) -> tuple[str, ...]:
        return (
            *(f"{path}: missing in the checkpoint" for path in self.missing),
            *(f"{path}: only in the checkpoint" for path in self.extra),
            *self.mismatched,
        )


@dataclass(frozen=True)
class LoadPlan:
    """A load that is known to fit: what of each tensor is needed, and where."""

    storage: Storage
    manifest: Manifest
    live: Mapping[str, torch.Tensor]
    leaves: Mapping[str, str]  # path to name
    match: Match
    is_partial: bool
    into_live: bool  # copy into live tensors; else all is returned

    def files_in_place(self) -> MappedCheckpoint | None:
        """For loading from where files lie, if they can be copied from there into live tensors."""
        return MappedCheckpoint.of(self.storage, self.manifest) if self.into_live else None

    def fingerprint(self) -> str:
        """What ranks that load together must have in common."""
        return digest(json.dumps([digest(self.manifest.to_bytes()), sorted(self.whole)]).encode())

    @functools.cached_property
    def whole(self) -> frozenset[str]:
        """Tensors that this rank needs all of: those that not only sharded ones take."""
        fitting = set(self.match.fitting)
        return frozenset(
            name
            for path, name in self.leaves.items()
            if path not in fitting or not is_dtensor(self.live[path])
        )

    def buffers(self) -> dict[str, TensorBuffer]:
        """Spare memory for what is needed of each tensor."""
        live = self._live_regions()
        # A tensor that no leaf names is not needed at all; only strangers write such.
        return {
            name: TensorBuffer(
                tensor.spec, None if name in self.whole else _regions(live.get(name, ()))
            )
            for name, tensor in self.manifest.tensors.items()
        }

    def live_memory(self) -> dict[str, TensorBuffer]:
        """The live tensors' own memory; spare memory only for what is returned besides."""
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


def prepare(storage: Storage, name: str, into: object, strict: bool) -> LoadPlan:
    manifest = read_manifest(storage, name)
    leaves = tensor_leaves(manifest.tree)
    live = {} if into is None else live_tensors(into)
    match = _match(manifest, leaves, live)
    differs = into is not None and bool(match.missing or match.extra or match.mismatched)
    if differs and strict:
        raise StateMismatch(
            name, missing=match.missing, extra=match.extra, mismatched=match.mismatched
        )
    return LoadPlan(storage, manifest, live, leaves, match, differs, into is not None)


def live_regions(live: torch.Tensor, path: str) -> Sequence[tuple[Region, torch.Tensor]]:
    """What this rank holds of a live tensor, with the memory."""
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
    for path, tensor in live.items():
        if path not in leaves:
            continue
        spec = manifest.tensors[leaves[path]].spec
        saved = (spec.shape, BY_NAME[spec.dtype].torch)
        if (tuple(tensor.shape), tensor.dtype) == saved:
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


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
