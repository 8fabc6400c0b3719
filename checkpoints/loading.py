"""Loading: verified into spare memory first, then copied into live tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from checkpoints.boxes import Box
from checkpoints.dtypes import BY_NAME
from checkpoints.errors import Mismatch
from checkpoints.exchange import Exchange, shares_of
from checkpoints.manifest import CheckpointInfo, Chunk, Manifest, Tensor, info_of
from checkpoints.reader import (
    Item,
    all_chunks,
    into_spare,
    read_chunks,
    read_manifest,
    scratch,
)
from checkpoints.sealed import digest
from checkpoints.sharded import block, blocks_of, is_sharded
from checkpoints.spare import Spare
from checkpoints.storage import Root, Storage, storage_for
from checkpoints.tree import live_tensors, tensor_leaves, unpack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


def load(
    root: Root,
    name: str,
    *,
    into: object = None,
    strict: bool = True,
    group: ProcessGroup | None = None,
    progress: Callable[[int], object] | None = None,
) -> Loaded:
    """Load a checkpoint by name, whatever the world that saved it.

    With ``into``, a state of the same form whose tensors are live ones, values are copied into
    these in place, after every byte that they need was verified; leaves that are not tensors are
    returned, not written. DTensors get what their placements say, however it was sharded when it
    was saved. If the tensors of both differ in path, shape or dtype, that is an error which lists
    them; with ``strict=False`` those that fit are copied.

    With ``group``, a process group of torch.distributed, its ranks load together: each reads and
    verifies an equal share of the bytes that all need, and they exchange them; of sharded tensors
    each reads what it needs. All raise what the first rank that fails raises, before any of them
    has changed a tensor. All must call it, with the same name and form of state.

    ``progress`` is called, by several threads, with the number of bytes of each chunk read.

    Raises :class:`NoCheckpoint`, :class:`Corrupt`, :class:`UnsupportedFormat`,
    :class:`ReadFailed`, :class:`Mismatch`; with ``group`` also :class:`LoadError`, if the group
    itself fails.
    """
    storage = storage_for(root)
    if group is None:
        job = _prepare(storage, name, into, strict)
        job.read(all_chunks(job.manifest), None, progress)
    else:
        job = _load_together(storage, name, into, strict, Exchange(group), progress)
    return job.finish()


def _load_together(
    storage: Storage,
    name: str,
    into: object,
    strict: bool,
    exchange: Exchange,
    progress: Callable[[int], object] | None,
) -> _Job:
    with exchange.together() as here:
        job = _prepare(storage, name, into, strict)
        here.must_agree(job.fingerprint())
    common = [item for item in all_chunks(job.manifest) if item[0].spec.name in job.whole]
    shares = shares_of(common, exchange.size)
    with exchange.together():
        own = [item for item in all_chunks(job.manifest) if item[0].spec.name not in job.whole]
        ranks = range(exchange.rank, len(job.manifest.writers), exchange.size)
        job.read([*shares[exchange.rank], *own], ranks, progress)
    exchange.all_gather(shares, job.spares)
    return job


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

    read_chunks(storage, manifest, all_chunks(manifest), target)
    return info_of(manifest)


@dataclass(frozen=True)
class _Job:
    """A load that is known to fit, its spare memory waiting to be filled."""

    storage: Storage
    manifest: Manifest
    live: Mapping[str, torch.Tensor]
    leaves: Mapping[str, str]
    match: _Match
    is_partial: bool
    spares: Mapping[str, Spare]

    @property
    def whole(self) -> frozenset[str]:
        """Tensors that this rank needs all of."""
        return frozenset(name for name, spare in self.spares.items() if spare.is_whole)

    def fingerprint(self) -> str:
        """What ranks that load together must have in common."""
        return digest(json.dumps([digest(self.manifest.to_bytes()), sorted(self.whole)]).encode())

    def read(
        self,
        items: Iterable[Item],
        headers: Collection[int] | None,
        progress: Callable[[int], object] | None,
    ) -> None:
        """Read and verify those of ``items`` that are needed, into spare memory."""
        target, put = into_spare(self.spares)

        def done(tensor: Tensor, chunk: Chunk, data: memoryview) -> None:
            put(tensor, chunk, data)
            if progress is not None:
                progress(chunk.end - chunk.begin)

        needed = [(t, c) for t, c in items if self.spares[t.spec.name].needs(c.place)]
        read_chunks(self.storage, self.manifest, needed, target, headers=headers, done=done)

    def finish(self) -> Loaded:
        """Copy what was verified into the live tensors."""
        with torch.no_grad():
            for path in self.match.fitting:
                _copy(self.spares[self.leaves[path]], self.live[path])
        fitting = set(self.match.fitting)

        def leaf(path: str, tensor: str) -> torch.Tensor:
            return self.live[path] if path in fitting else self.spares[tensor].tensor

        return Loaded(
            state=unpack(self.manifest.tree, leaf),
            info=info_of(self.manifest),
            left_out=self.match.left_out() if self.is_partial else (),
        )


def _prepare(storage: Storage, name: str, into: object, strict: bool) -> _Job:
    manifest = read_manifest(storage, name)
    leaves = tensor_leaves(manifest.tree)
    live = {} if into is None else live_tensors(into)
    match = _match(manifest, leaves, live)
    differs = into is not None and bool(match.missing or match.extra or match.mis_shaped)
    if differs and strict:
        raise Mismatch(name, missing=match.missing, extra=match.extra, mis_shaped=match.mis_shaped)
    spares = _spares(manifest, leaves, {path: live[path] for path in match.fitting})
    return _Job(storage, manifest, live, leaves, match, differs, spares)


def _spares(
    manifest: Manifest, leaves: Mapping[str, str], live: Mapping[str, torch.Tensor]
) -> dict[str, Spare]:
    """Memory for each tensor: blocks where only sharded ones take it, else for all of it."""
    boxes: dict[str, list[Box] | None] = {}
    for path, name in leaves.items():
        tensor = live.get(path)
        if tensor is None or not is_sharded(tensor):
            boxes[name] = None
        else:
            mine = [box for box, _ in blocks_of(tensor, path)]
            known = boxes.setdefault(name, [])
            if known is not None:
                known += [box for box in mine if box not in known]
    # A tensor that no leaf names is not needed at all; only strangers write such.
    return {
        name: Spare(tensor.spec, boxes.get(name, [])) for name, tensor in manifest.tensors.items()
    }


def _copy(spare: Spare, live: torch.Tensor) -> None:
    if not is_sharded(live):
        live.copy_(spare.tensor)
        return
    for box, memory in blocks_of(live):
        if spare.is_whole:
            memory.copy_(block(spare.tensor, box))
        elif box.count:
            memory.copy_(next(found for known, found in spare.blocks if known == box))


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
