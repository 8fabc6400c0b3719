"""Synchronous save: write this rank's share, commit if all shares exist. No collectives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

from checkpoints.errors import ArgumentError, StateError
from checkpoints.format.lineage import as_lineage
from checkpoints.format.manifest import Ancestor, Lineage
from checkpoints.format.names import MAX_WORLD_SIZE, CheckpointName
from checkpoints.format.state_tree import flatten, spec_of
from checkpoints.policies.retention import LatestN, RetentionFunction
from checkpoints.saving.attempt import (
    SaveResult,
    WriteAttempt,
    commit_if_complete,
    write_unless_committed,
)
from checkpoints.storage.patient import patient
from checkpoints.storage.roots import Root, storage_for
from checkpoints.tensors.elements import bytes_of, check_held
from checkpoints.tensors.partition import TensorSpec, share_of
from checkpoints.tensors.regions import Extent

Clock = Callable[[], float]
"""Returns seconds since 1970; recorded and displayed, never used for decisions."""


def save(
    root: Root,
    state: object,
    *,
    step: int,
    nonce: str,
    generation: int = 0,
    rank: int = 0,
    world_size: int = 1,
    lineage: Iterable[Ancestor | tuple[int, int]] = (),
    section: tuple[int, ...] | None = None,
    data_position: Any = None,
    keep: RetentionFunction | None = LatestN(3),  # noqa: B008  frozen
    fence: Callable[[], bool] | None = None,
    clock: Clock = time.time,
    progress: Callable[[int], object] | None = None,
) -> SaveResult:
    """Write this rank's share of ``state``, and commit if all ``world_size`` shares exist.

    Every rank of a world calls it with the same tensors, step, generation and nonce; no rank waits
    for another. ``state`` is a tree of dicts, lists and tuples of JSON values and tensors; values
    that are not tensors are saved from rank 0. Each rank writes its shard of a DTensor (FSDP2,
    tensor parallelism), or an equal slice of a replicated one; ``rank`` and ``world_size`` are then
    those of torch.distributed. ``nonce`` identifies the world: shared by its writers and by no
    others (:func:`checkpoints.new_nonce`). ``section``: the ranks that save the same tensors as
    this one, if others save other keys of the state (:class:`WriterGroup`). ``data_position`` is
    any JSON value, returned on load. ``keep`` is applied after the commit. ``fence`` is called
    before it: False means that this world is stale, and the attempt stays uncommitted. ``progress``
    is called with the number of bytes of each chunk before it is written.

    Saving a committed step again writes nothing and returns ``committed=True``; with another state
    it raises :class:`NameTaken`: a run that goes back to an older step needs a new nonce.

    Raises :class:`ArgumentError` and :class:`StateError` before anything is written, and
    :class:`SaveError` if the storage fails; older checkpoints are unchanged in every case, and a
    failed attempt leaves nothing that takes space.
    """
    check_world(rank, world_size, section)
    name = CheckpointName(step, generation, nonce)
    check_json(data_position)
    ancestors = lineage_of(name, lineage)
    storage = patient(storage_for(root))
    tree, tensors = flatten(state)
    specs = tuple(spec_of(key, tensor) for key, tensor in tensors.items())

    pieces = share_of(specs, world_size, rank, section)
    for spec, place in pieces:  # reading them while writing would fail the other writers, too
        check_held(tensors[spec.name], place)

    def data(spec: TensorSpec, place: Extent) -> memoryview:
        if progress is not None:
            progress(place.count * spec.element_bytes)
        return bytes_of(tensors[spec.name], place)

    attempt = WriteAttempt(
        name=name,
        rank=rank,
        world_size=world_size,
        lineage=ancestors,
        data_position=data_position,
        specs=specs,
        tree=tree,
        section=section,
        pieces=pieces,
        data=data,
    )
    written = write_unless_committed(storage, attempt, clock)
    if written is None:
        return SaveResult(name=str(name), step=step, bytes_written=0, committed=True)
    return commit_if_complete(storage, attempt, written, keep=keep, fence=fence)


def buffer_wait_s(busy: Literal["skip", "wait"] | None, writers: int, deadline_s: float) -> float:
    """How long a save of ``writers`` ranks waits for a free buffer.

    Raises :class:`ArgumentError` if several writers would each decide alone whether to skip.
    """
    if busy == "skip" and writers > 1:
        raise ArgumentError(
            f'busy="skip" with {writers} writers: each would decide by its own buffers, and a save '
            'that lacks a share is never committed. Omit busy or use busy="wait"; if all ranks '
            "have agreed on Engine.has_free_buffer, pass wait_s=0.0 to save_async"
        )
    waits = busy == "wait" or (busy is None and writers > 1)
    return deadline_s if waits else 0.0


def check_world(rank: int, world_size: int, section: tuple[int, ...] | None = None) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ArgumentError(f"world_size {world_size} is not between 1 and {MAX_WORLD_SIZE}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} is not between 0 and {world_size - 1}")
    if section is None:
        return
    is_ordered = bool(section) and list(section) == sorted(set(section))
    if not is_ordered or not 0 <= section[0] <= section[-1] < world_size:
        raise ArgumentError(
            f"section {section} is not an ordered tuple of ranks below {world_size}"
        )
    if rank not in section:
        raise ArgumentError(f"rank {rank} is not in its section {section}")


def check_json(data_position: Any) -> None:
    try:
        text = json.dumps(data_position, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"data_position is not strict JSON: {error}") from error
    if json.loads(text) != data_position:
        raise StateError(
            f"data_position would be loaded as another value: {text[:200]}",
            hint="Use lists instead of tuples, and strings as the keys of dicts.",
        )


def lineage_of(name: CheckpointName, pairs: Iterable[Ancestor | tuple[int, int]]) -> Lineage:
    lineage = as_lineage(pairs)
    if lineage and lineage[-1].generation != name.generation:
        raise ArgumentError(
            f"the lineage ends with generation {lineage[-1].generation}, "
            f"but the checkpoint belongs to generation {name.generation}",
            hint="checkpoints.derive_lineage(origin, generation) returns it.",
        )
    if lineage and lineage[-1].began_at_step > name.step:
        raise ArgumentError(
            f"generation {name.generation} began at step {lineage[-1].began_at_step}, "
            f"after step {name.step}"
        )
    return lineage
