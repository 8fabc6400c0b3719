"""Lineage: which checkpoints belong to one training history.

A *generation* is one world of writers; programs that are not elastic have only generation 0. A
generation starts from a state: the initial one (step 0), a checkpoint, or the memory of a live
peer, at some step. The *lineage* of a state is the list of (generation, step at which it began),
oldest first; the last entry is the generation that holds the state. Every checkpoint records it.

Where generation h follows g in a lineage and began at step s, the history left g at s. So a
checkpoint (g, step) is **on** a lineage if g is in it, the step is not before the start of g and,
unless g is last, not after the start of its successor. Every other checkpoint of a generation up to
the last is **abandoned**: its writer continued from it, but this history does not include it.
Example: generation 1 saves at 100, 200 and 300; 300 is damaged, so generation 2 begins at 200 and
saves at 250. The lineage is ((1, 0), (2, 200)); (1, 300) is abandoned, even if it becomes readable
again (a network disk recovers).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from checkpoints.errors import ArgumentError
from checkpoints.format.manifest import Ancestor, CheckpointInfo, Lineage
from checkpoints.format.names import CheckpointName


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
