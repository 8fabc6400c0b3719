"""Compares the ranks of a replica that must hold the same part of a parameter.

Ranks along ``tp`` and ``ep`` see the same samples, and compute the same result. Nothing reduces the
gradients of parameters that each of them holds whole: if these differ, their weights drift apart,
and the model is worse, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic.errors import TrainingError
from elastic.process_group import all_gather_json
from elastic.training.gradients.fingerprints import HeldParts, differ
from elastic.world.mesh import EXPERTS
from elastic.world.world import World

_ROUNDING = 1e-4  # relative to the largest weight: processors may round differently
_UNEQUAL = 1e-6  # the same, for weights that were updated with different gradients
_PARTIAL = 0.1  # of the norm: far more than rounding, also in bfloat16
# Smaller differences may be nothing but rounding: the bias of keys in attention has no gradient.
_NOISE = 0.01  # of the root mean square of all gradients
_FEWEST = 8  # elements; fewer may all be sums that almost cancel out

_AS_PARTS = """\
a part of a weight that each rank creates for itself (column and row layers as in Megatron) is a \
sharded parameter: nn.Parameter(DTensor.from_local(own, run.mesh["tp"], [Shard(0)])), [Shard(1)] \
in a row layer, and .to_local() in forward"""

Weights = Mapping[str, Sequence[torch.Tensor]]


def compare_same_parts(
    weights: Weights, parts: Mapping[str, HeldParts], world: World, step: int
) -> bool:
    """Raise TrainingError on all ranks if ranks of a replica that hold the same part of a parameter
    differ. False if only gradients differ: the weights were not updated with them."""
    wrapped = [name for name in weights if name in parts]
    own = {
        name: {
            "names": list(parts[name].names),
            "sizes": [t.numel() for t in weights[name]],
            "weights": [_projections(t) for t in weights[name]],
            "first": list(parts[name].first_holders),
            "gradients": list(parts[name].gradients),
        }
        for name in wrapped
    }
    gathered = all_gather_json(own)
    is_same = True
    for rank, modules in enumerate(gathered):
        begin = rank - rank % world.mesh.size
        for name, found in modules.items():
            noise = _noise(found)
            for index, first in enumerate(found["first"]):
                reference = gathered[begin + first][name]
                difference = _relative_difference(
                    found["weights"][index], reference["weights"][index]
                )
                is_partial = _is_partial(index, found, reference, noise)
                if difference > _ROUNDING or (is_partial and difference > _UNEQUAL):
                    place = f"{name} (parameter {index}, {found['names'][index]!r})"
                    raise _error(step, rank, begin + first, place, world, is_partial=is_partial)
                is_same = is_same and not is_partial
    return is_same


def _projections(tensor: torch.Tensor) -> list[float]:
    """Numbers that rounding hardly changes, but different weights do: the largest absolute value,
    and sums over different elements."""
    if not tensor.numel():
        return []
    with torch.no_grad():
        flat = tensor.detach().reshape(-1).double()
        sums = [flat.sum(), flat[::2].sum(), flat[: flat.numel() // 2 + 1].sum()]
        size = flat.numel() ** 0.5
        return [float(flat.abs().max()), *(float(each) / size for each in sums)]


def _relative_difference(own: Sequence[float], reference: Sequence[float]) -> float:
    if len(own) != len(reference):
        return math.inf
    largest = max((abs(a - b) for a, b in zip(own, reference, strict=True)), default=0.0)
    if not largest:
        return 0.0
    return largest / reference[0] if reference[0] else math.inf


def _noise(found: Any) -> float:
    """The root mean square below which a difference of gradients may be rounding."""
    taken = [(g[0], n) for g, n in zip(found["gradients"], found["sizes"], strict=True) if g]
    total = sum(size for _, size in taken)
    return _NOISE * math.sqrt(sum(norm**2 for norm, _ in taken) / total) if total else 0.0


def _is_partial(index: int, found: Any, reference: Any, noise: float) -> bool:
    """Whether two gradients differ by more than rounding."""
    one, other = found["gradients"][index], reference["gradients"][index]
    size, norm = found["sizes"][index], max((*one[:1], *other[:1]), default=0.0)
    return size >= _FEWEST and differ(one, other) > max(_PARTIAL * norm, noise * math.sqrt(size))


def _error(
    step: int, rank: int, first: int, place: str, world: World, *, is_partial: bool
) -> TrainingError:
    why = (
        "their gradients differ, too"
        if is_partial
        else "they began with different weights, or their gradients differ along a dimension"
    )
    return TrainingError(
        f"after step {step}, rank {rank} has different weights from rank {first} in {place}, but "
        f"both must hold the same part of it: {why} (mesh {world.mesh}: ranks along tp and ep see "
        "the same samples, and nothing is reduced over them)",
        hint=_hint(world),
    )


def _hint(world: World) -> str:
    dim = EXPERTS if EXPERTS in world.mesh.split_dims else "tp"
    lines = [
        "create the model after torch.manual_seed(0), the same on all ranks",
        f"if ranks along {dim} split a sample or its tokens, the backward pass must sum gradients "
        f'of the other parameters over run.mesh["{dim}"] (an autograd function that is the '
        "identity, and whose backward is an all-reduce); for ranks with parts of a sample there is "
        "the dimension cp, over which fully_shard reduces",
    ]
    if dim == EXPERTS:
        lines.insert(
            0,
            "experts that each rank creates for itself are sharded parameters: nn.Parameter("
            'DTensor.from_local(own, run.mesh["ep"], [Shard(0)])), and .to_local() in forward',
        )
    else:
        lines.insert(0, _AS_PARTS)
    return ";\n      ".join(lines) + " (docs/how-to/sharded.md)"
