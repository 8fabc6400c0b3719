"""Loading: verified into spare memory first, then copied into live tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpoints.dtypes import BY_NAME
from checkpoints.errors import Mismatch
from checkpoints.manifest import CheckpointInfo, Chunk, Manifest, Tensor, info_of
from checkpoints.reader import read_chunks, read_manifest, read_tensors, scratch
from checkpoints.storage import Root, storage_for
from checkpoints.tree import live_tensors, tensor_leaves, unpack


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded.

    ``state`` is the whole saved state; where a live tensor was given, it stands there itself.
    ``left_out`` says, with ``strict=False``, which tensors were not copied, and why.
    """

    state: Any
    info: CheckpointInfo
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Match:
    """How saved and live tensors fit, by path."""

    fitting: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    mis_shaped: tuple[str, ...]

    def left_out(self) -> tuple[str, ...]:
        return (
            *(f"{path}: missing in the checkpoint" for path in self.missing),
            *(f"{path}: only in the checkpoint" for path in self.extra),
            *self.mis_shaped,
        )


def load(root: Root, name: str, *, into: object = None, strict: bool = True) -> Loaded:
    """Load a checkpoint by name, whatever the world that saved it.

    Every byte is verified before anything is changed. With ``into``, a state of the same form
    whose tensors are live ones, values are copied into these in place; leaves that are not
    tensors are returned, not written. If the tensors of both differ in path, shape or dtype,
    that is an error which lists them; with ``strict=False`` those that fit are copied.

    Raises :class:`NoCheckpoint`, :class:`Corrupt`, :class:`UnsupportedFormat`,
    :class:`ReadFailed`, :class:`Mismatch`.
    """
    storage = storage_for(root)
    manifest = read_manifest(storage, name)
    leaves = tensor_leaves(manifest.tree)
    live = {} if into is None else live_tensors(into)
    match = _match(manifest, leaves, live)
    differs = into is not None and (match.missing or match.extra or match.mis_shaped)
    if differs and strict:
        raise Mismatch(name, missing=match.missing, extra=match.extra, mis_shaped=match.mis_shaped)
    tensors = read_tensors(storage, manifest)
    with torch.no_grad():
        for path in match.fitting:
            live[path].copy_(tensors[leaves[path]])
    fitting = set(match.fitting)

    def leaf(path: str, tensor: str) -> torch.Tensor:
        return live[path] if path in fitting else tensors[tensor]

    return Loaded(
        state=unpack(manifest.tree, leaf),
        info=info_of(manifest),
        left_out=match.left_out() if differs else (),
    )


def verify(
    root: Root, name: str, *, progress: Callable[[int], object] | None = None
) -> CheckpointInfo:
    """Read every byte of a checkpoint; raises what :func:`load` raises, keeps nothing.

    ``progress`` is called with the bytes of each chunk, before it is read.
    """
    storage = storage_for(root)
    manifest = read_manifest(storage, name)
    room = scratch()

    def target(tensor: Tensor, chunk: Chunk) -> memoryview:
        if progress is not None:
            progress(chunk.end - chunk.begin)
        return room(tensor, chunk)

    read_chunks(storage, manifest, target)
    return info_of(manifest)


def _match(
    manifest: Manifest, leaves: Mapping[str, str], live: Mapping[str, torch.Tensor]
) -> _Match:
    fitting, mis_shaped = [], []
    for path, tensor in live.items():
        if path not in leaves:
            continue
        spec = manifest.tensors[leaves[path]].spec
        saved = (spec.shape, BY_NAME[spec.dtype].torch)
        if (tuple(tensor.shape), tensor.dtype) == saved:
            fitting.append(path)
        else:
            mis_shaped.append(
                f"{path} (saved {_shape(*saved)}, here {_shape(tuple(tensor.shape), tensor.dtype)})"
            )
    return _Match(
        fitting=tuple(fitting),
        missing=tuple(path for path in live if path not in leaves),
        extra=tuple(path for path in leaves if path not in live),
        mis_shaped=tuple(mis_shaped),
    )


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
