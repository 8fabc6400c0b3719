"""How parameters are sharded, and which ranks must hold the same part."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from checkpoints.tensors import is_dtensor, local_of
from elastic import torch_fsdp, torch_private
from elastic.errors import ConfigError, TrainingError
from elastic.groups.collectives import all_gather_json
from elastic.groups.world import EXPERTS, STAGES, ReplicaMesh, World

# ----------------------------------------------------------------------------
# Detects sharded models by their tensors, and refuses them where they cannot work.
#
# An in-process change of the world destroys its group and builds another one. DTensors (FSDP2's
# ``fully_shard``, ``parallelize_module``, anything on a DeviceMesh) and FSDP1 keep the groups that
# they were created with, and a joining rank has no shards: neither DDP nor the transfer of state
# between ranks can handle them. FSDP2 over the replicas of ``elastic.join(mesh=…)`` is supported
# (:mod:`elastic.train.sharded`); all others recover by a restart of the workers,
# without ``elastic.join``: every error names docs/how-to/sharded.md and the lines to use.

_INSTEAD = """\
FSDP2 in replicas recovers in process with elastic.join(mesh={"shard": 2}) and \
run.wrap(fully_shard(model, mesh=run.mesh["shard"])). FSDP2 over the whole world is built in each:
      def build(mesh):
          model = Net(); fully_shard(model, mesh=mesh)
          return model, torch.optim.AdamW(model.parameters())
      def train():
          model, optimizer = run.build(build)                     # in place of run.wrap, run.track
          for epoch in run.epochs(…): …
      run.retry(train)
Any other sharded model recovers by a restart of its workers (docs/how-to/sharded.md has complete \
loops). Replace elastic.join, run.wrap, run.track and run.retry by
      dist.init_process_group()                  # torchrun --rdzv-backend=etcd …
      fully_shard(model)                         # or parallelize_module(model, mesh, plan)
      optimizer = torch.optim.AdamW(model.parameters())           # after the model is sharded
      state = {"model": get_model_state_dict(model),
               "optimizer": get_optimizer_state_dict(model, optimizer)}
      if found := checkpoints.latest(folder).checkpoint:
          checkpoints.load(folder, found.name, into=state, group=dist.group.WORLD)
          set_optimizer_state_dict(model, optimizer, state["optimizer"])
    or train it unsharded with DDP: call run.wrap(model) without sharding it."""


class CurrentParameters:
    """The parameters of a module, read from where it keeps them: ``load_state_dict(assign=True)``
    replaces some. To walk a large module in every pass would take more than a millisecond.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self.find()

    def find(self) -> None:
        """Find where the module's parts keep their parameters."""
        self._slots = [
            (own, name)
            for part in self._module.modules()
            for own in (torch_private.parameters_of(part),)
            for name, parameter in own.items()
            if parameter is not None
        ]

    def read(self) -> list[nn.Parameter]:
        """The current parameters, each once, in the order of ``module.parameters()``."""
        current = [own.get(name) for own, name in self._slots]
        return list({id(p): p for p in current if p is not None}.values())


def refuse_module(call: str, module: nn.Module, *, stale: Iterable[str] = ()) -> None:
    """Raise ConfigError if ``module`` is sharded, naming the place.

    ``stale``: names of optimizers with parameters that no module has.
    """
    if part := _sharded_part(module):
        raise refusal(f"{call}: {part}{_created_before(stale)}")


def refuse_optimizer(call: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` has a sharded parameter, naming it."""
    if part := sharded_parameter(optimizer):
        raise refusal(f"{call}: its {part}")


def refuse_tensors(call: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError if one of these is sharded, naming it."""
    for name, tensor in tensors.items():
        if part := _description(tensor):
            raise refusal(f"{call}: {name} is {part}")


def refuse_stale_optimizers(module: str, names: Iterable[str]) -> None:
    """Raise ConfigError if there are tracked optimizers of parameters that no module has."""
    if stale := list(names):
        raise ConfigError(
            f"run.track({stale[0]}=…): the optimizer's parameters are not in the wrapped {module}: "
            "they were created before it was sharded, and get no gradients",
            hint="create the optimizer after fully_shard: torch.optim.AdamW(model.parameters())",
        )


def local_value(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: its shard, or all of it."""
    return local_of(tensor) if is_dtensor(tensor) else tensor


def like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor sharded like a parameter, of which ``local`` is this rank's part."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    whole: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole


def ranks_along(device_mesh: Any) -> list[list[int]]:
    """For each dimension of a DeviceMesh, the ranks along it, including this one.

    Names would not do: a flattened dimension has a different one.
    """
    place, ranks = device_mesh.get_coordinate(), device_mesh.mesh
    if place is None:  # this rank is not in the mesh
        return [[]]
    every = slice(None)
    places = [(*place[:i], every, *place[i + 1 :]) for i in range(device_mesh.ndim)]
    return [ranks[row].tolist() for row in places]


def sharded_over(parameter: Any, mesh: ReplicaMesh) -> frozenset[str]:
    """The dimensions of the replica along which ranks hold different parts of a parameter, or
    parameters of different stages."""
    stages = frozenset({STAGES}) if mesh.stages > 1 else frozenset()
    if not is_dtensor(parameter):
        return stages
    along = zip(parameter.placements, ranks_along(parameter.device_mesh), strict=True)
    spanned = [mesh.dims_along(ranks) for placement, ranks in along if not placement.is_replicate()]
    return stages.union(*(dims for dims in spanned if dims is not None))


def is_sharded(module: nn.Module) -> bool:
    """Whether a module has sharded parts."""
    return bool(_sharded_part(module))


def sharded_parameter(optimizer: torch.optim.Optimizer) -> str:
    """The first sharded parameter of an optimizer, in words; "" if there is none."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or ()
        for index, parameter in enumerate(group["params"]):
            if part := _description(parameter):
                name = repr(names[index]) if index < len(names) else f"{index} of group {number}"
                return f"parameter {name} is {part}"
    return ""


def refusal(what: str) -> ConfigError:
    """The error for a sharded model, with the lines that replace the call."""
    return ConfigError(
        f"{what}; worlds cannot change around a sharded model in process", hint=_INSTEAD
    )


def named_tensors(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in plain containers, each with its path below ``place``."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(f"{place}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(f"{place}/{index}", item)


def _sharded_part(module: nn.Module) -> str:
    """The first sharded part of a module, in words; "" if there is none."""
    for name, part in module.named_modules():
        if kind := _wrapper_of(part):
            return f"{repr(name) if name else f'the {type(part).__name__}'} is {kind}"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if described := _description(tensor):
            return f"{name!r} is {described}"
    # A part without parameters of its own: those to shard are added, or materialised, later.
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for name, part in module.named_modules():
            if isinstance(part, fsdp.FSDPModule):
                return f"{name or type(part).__name__!r} was passed to fully_shard"
    return ""


def _wrapper_of(part: nn.Module) -> str:
    # Importing it takes a second; a script that has wrapped a module has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
        return "a FullyShardedDataParallel (FSDP1)"
    return ""


def _description(tensor: torch.Tensor) -> str:
    if is_dtensor(tensor):
        placed: Any = tensor
        kinds = ", ".join(map(str, placed.placements))
        return f"a DTensor ({kinds} over {placed.device_mesh})"
    if torch_fsdp.is_flat_parameter(tensor):
        return "the flat parameter of a FullyShardedDataParallel (FSDP1)"
    return ""


def _created_before(optimizers: Iterable[str]) -> str:
    names = ", ".join(map(repr, optimizers))
    if not names:
        return ""
    return (
        f"; the optimizer tracked as {names} holds parameters of no wrapped module: created "
        "before the model was sharded, it would train parameters that sharding has replaced"
    )


def created_too_early(optimizer: torch.optim.Optimizer, step: int) -> ConfigError:
    """The error for an optimizer of parameters that sharding has replaced."""
    return ConfigError(
        f"{type(optimizer).__name__}.step() at step {step}: the optimizer has the "
        "parameters from before fully_shard, which get no gradients, so nothing is trained",
        hint="create the optimizer after fully_shard: torch.optim.AdamW(model.parameters()), and "
        "run.track(optimizer=optimizer)",
    )


# ----------------------------------------------------------------------------
# Fingerprints of the gradients with which a module's first update was made.
#
# Ranks that see the same samples (along ``tp`` and ``ep``) hold some parameters whole and update
# each for itself, so their gradients must be the same. They are not if every rank creates its own
# experts under the same names, or if the backward pass leaves partial gradients. A fingerprint is
# a few numbers; ranks compare them with the weights
# . Nothing is computed after a comparison without a
# difference.

SIGNS = 4  # sums with pseudo-random signs: their differences are about the norm of the difference
_BLOCK, _ROWS = 1 << 16, 64  # elements with signs of their own, and blocks that are read at once

Parameters = Callable[[], Sequence[torch.Tensor]]
Fingerprint = list[float]
"""The norm of a gradient and its :data:`SIGNS` sums; empty: no gradient."""


class HeldParts(NamedTuple):
    """This rank's parts of a module's parameters, in order."""

    names: Sequence[str]
    first_holders: Sequence[int]  # the first rank of the replica with the same part, for each
    gradients: Sequence[Fingerprint] = ()  # of their last update; empty once they were compared


class GradientFingerprints:
    """Takes the fingerprints of some parameters after each update, until they are compared."""

    def __init__(self, indices: Collection[int], current: Parameters) -> None:
        self.taken: list[Fingerprint] = [[] for _ in current()]
        self._indices, self._current = indices, current
        self._handle: Any = None
        self._is_done = not indices

    def begin(self) -> None:
        """Take fingerprints from now on, unless they were compared."""
        if not self._is_done and self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._take)

    def end(self) -> None:
        """Stop taking them."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def compared(self) -> None:
        """Note that ranks had the same gradients: stop for good."""
        self._is_done = True
        self.end()
        self.taken = [[] for _ in self.taken]

    def _take(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        current = self._current()
        for index in self._indices:
            parameter = current[index]
            if id(parameter) in stepped:
                self.taken[index] = _fingerprint(parameter.grad)


def _fingerprint(gradient: torch.Tensor | None) -> Fingerprint:
    if gradient is None or gradient.is_sparse or _is_partial_fingerprints(gradient):
        return []
    with torch.no_grad():
        flat = local_value(gradient.detach()).reshape(-1)
        if not flat.numel():
            return []
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        sums = [norm, *_signed_sums(flat).tolist()]
    return sums if all(map(math.isfinite, sums)) else []


def _is_partial_fingerprints(gradient: Any) -> bool:
    """Whether the gradient is the sum of what the ranks have (``SequenceParallel``)."""
    return is_dtensor(gradient) and any(p.is_partial() for p in gradient.placements)


def _signed_sums(flat: torch.Tensor) -> torch.Tensor:
    size = min(_BLOCK, flat.numel())
    signs = torch.randint(
        0, 2, (size, SIGNS), generator=torch.Generator().manual_seed(size), device="cpu"
    )
    signs = signs.to(flat.device, torch.float64).mul_(2).sub_(1)
    sums = flat.new_zeros(SIGNS, dtype=torch.float64)
    for start in range(0, flat.numel(), size * _ROWS):
        piece = flat[start : start + size * _ROWS].double()
        whole = piece.numel() // size * size
        sums += piece[:whole].view(-1, size).sum(0) @ signs
        sums += piece[whole:] @ signs[: piece.numel() - whole]
    return sums


def differ(own: Sequence[float], reference: Sequence[float]) -> float:
    """The norm of the difference of two gradients, estimated from their fingerprints."""
    one, other = (given or [0.0] * (SIGNS + 1) for given in (own, reference))
    squares = [(a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)]
    return math.sqrt(sum(squares) / SIGNS)


# ----------------------------------------------------------------------------
# Compares the ranks of a replica that must hold the same part of a parameter.
#
# Ranks along ``tp`` and ``ep`` see the same samples, and compute the same result. Nothing reduces
# the gradients of parameters that each of them holds whole: if these differ, their weights drift
# apart, and the model is worse, without an error.

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
        for name, held in modules.items():
            noise = _noise(held)
            for index, first in enumerate(held["first"]):
                reference = gathered[begin + first][name]
                difference = _relative_difference(
                    held["weights"][index], reference["weights"][index]
                )
                is_partial = _is_partial_same_parts(index, held, reference, noise)
                if difference > _ROUNDING or (is_partial and difference > _UNEQUAL):
                    place = f"{name} (parameter {index}, {held['names'][index]!r})"
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


def _is_partial_same_parts(index: int, found: Any, reference: Any, noise: float) -> bool:
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
