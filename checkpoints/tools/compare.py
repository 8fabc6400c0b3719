"""Compares two checkpoints tensor by tensor, with one tensor of each in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from checkpoints.catalog.manifests import read_manifest
from checkpoints.format.manifest import Manifest, TensorEntry
from checkpoints.format.state_tree import tensor_leaves
from checkpoints.loading.buffers import TensorBuffer
from checkpoints.loading.reader import into_buffers, read_chunks
from checkpoints.loading.tiered_storage import readable
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints, and how."""

    tensor: str
    what: str


def compare(
    root: Root, old: str, new: str, *, progress: Callable[[int], object] | None = None
) -> tuple[Difference, ...]:
    """The differences between the tensors of two checkpoints, ordered by path.

    Tensors whose chunks have equal places and hashes are equal and are not read. ``progress`` is
    called with the number of bytes processed; their sum is the size of both checkpoints.
    Raises the same errors as :func:`checkpoints.load`.
    """
    storage = readable(root)
    sides = tuple(_Side(storage, read_manifest(storage, name)) for name in (old, new))
    before, after = sides
    found = []
    for path in sorted(before.leaves.keys() | after.leaves.keys()):
        what = _difference(before, after, path)
        if what:
            found.append(Difference(path, what))
        if progress is not None:
            progress(sum(side.size_bytes(path) for side in sides))
    return tuple(found)


class _Side:
    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self.leaves = tensor_leaves(manifest.tree)

    def tensor(self, path: str) -> TensorEntry | None:
        name = self.leaves.get(path)
        return None if name is None else self._manifest.tensors[name]

    def size_bytes(self, path: str) -> int:
        tensor = self.tensor(path)
        return 0 if tensor is None else tensor.spec.size_bytes

    def read(self, tensor: TensorEntry) -> torch.Tensor:
        """The verified elements of a tensor."""
        name = tensor.spec.name
        buffers = {name: TensorBuffer(tensor.spec)}
        target, done = into_buffers(buffers)
        items = [(tensor, chunk) for chunk in tensor.chunks]
        read_chunks(self._storage, self._manifest, items, target, headers=(), done=done)
        return buffers[name].tensor


def _difference(before: _Side, after: _Side, path: str) -> str:
    old, new = before.tensor(path), after.tensor(path)
    if old is None or new is None:
        return f"only in the {'new' if old is None else 'old'} one"
    if (old.spec.dtype, old.spec.shape) != (new.spec.dtype, new.spec.shape):
        return f"{_form(old)} became {_form(new)}"
    if {(c.place, c.xxh3_128) for c in old.chunks} == {(c.place, c.xxh3_128) for c in new.chunks}:
        return ""
    return _by_element(before.read(old), after.read(new))


def _form(tensor: TensorEntry) -> str:
    return f"{tensor.spec.dtype} {list(tensor.spec.shape)}"


def _by_element(old: torch.Tensor, new: torch.Tensor) -> str:
    if torch.equal(_bytes(old), _bytes(new)):
        return ""  # equal, but written at different world sizes
    wide = torch.complex128 if old.is_complex() else torch.float64
    difference = (new.to(wide) - old.to(wide)).abs()
    count = int((difference != 0).sum())  # NaN differs from everything
    return f"{count} of {old.numel()} elements differ, by at most {float(difference.max()):.3g}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
