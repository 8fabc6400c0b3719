"""Which checkpoints belong to one history.

A *generation* is one world of writers; plain programs have only generation 0. Generation g
begins with a state: nothing (step 0), a checkpoint, or a live peer's memory, at some step. The
*lineage* of a state is the list of (generation, step at which it began), oldest first; the last
entry is the generation that holds the state. It is kept in every checkpoint.

Where generation h follows g in a lineage and began at step s, the history has left g at s. So a
checkpoint (g, step) is **on** a lineage if g stands in it, the step is not before g's beginning
and, unless g is last, not after the beginning of its successor. Every other one of a generation
up to the last is **abandoned**: whoever wrote it went on, but this history did not come from
there. Example: generation 1 saves at 100, 200 and 300; 300 is damaged, so generation 2 begins
at 200 and saves at 250. The lineage is ((1, 0), (2, 200)); (1, 300) is abandoned, even if it can
be read after all (a network disk came back).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from checkpoints.errors import ArgumentError
from checkpoints.format.manifest import Ancestor, CheckpointInfo, Lineage
from checkpoints.format.names import CheckpointName


def as_lineage(pairs: Iterable[Ancestor | tuple[int, int]]) -> Lineage:
    """A lineage from pairs. Raises :class:`ArgumentError` if it is none."""
    lineage = tuple(p if isinstance(p, Ancestor) else Ancestor(*p) for p in pairs)
    for older, newer in pairwise(lineage):
        if newer.generation <= older.generation:
            raise ArgumentError(
                f"lineage: generation {newer.generation} follows {older.generation}; "
                "generations grow"
            )
    if any(a.generation < 0 or a.began_at_step < 0 for a in lineage):
        raise ArgumentError("lineage: a generation or step is negative")
    return lineage


def derive_lineage(origin: CheckpointInfo | None, generation: int) -> Lineage:
    """The lineage of ``generation``, which begins with the state of ``origin`` (None: from zero).

    >>> derive_lineage(None, 1)
    (Ancestor(generation=1, began_at_step=0),)
    """
    if origin is None:
        return (Ancestor(generation, 0),)
    if origin.generation >= generation:
        # Plain programs stay in one generation: the history simply goes on.
        return origin.lineage
    before = origin.lineage or (Ancestor(origin.generation, 0),)
    return (*before, Ancestor(generation, origin.step))


def why_abandoned(name: CheckpointName, lineage: Lineage) -> str | None:
    """Why a checkpoint is not on a lineage, in words; None if it is (or the lineage is empty)."""
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
