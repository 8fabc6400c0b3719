"""One of four ranks: gradients of sharded models over replicas, compared with an unsharded model.

Started by ``test_replica_gradients.py``, once per rank. Prints one JSON object: for each case, the
largest difference or the error.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit import nccl_semantics
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from elastic.errors import ConfigError, GroupAborted
from elastic.groups.replica import ModelReplica, ReplicaProcessGroup
from elastic.groups.world import ReplicaMesh
from elastic.link.link import GroupSpec, ReplicaRendezvous
from elastic.train.sharded import ShardedModule
from elastic.wire.handshake import SecretKey

SIZE = 4
SHARES = (5, 2, 1, 4)  # samples of each part of the data in a step
Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functools.partial(checkpoint, self.first, use_reentrant=False)
        made: torch.Tensor = self.last(torch.tanh(hidden(x) if self.recompute else self.first(x)))
        return made


class Rank:
    def __init__(
        self,
        rank: int,
        ports: list[int],
        folder: Path,
        mesh: ReplicaMesh,
        backend: str = "gloo",
    ) -> None:
        self.rank, self.ports, self.mesh = rank, ports, mesh
        self.replica = ModelReplica(mesh, local_rank=rank, backend=backend)
        nonce = f"{mesh}-{rank // mesh.size}"
        self.replica.form(ReplicaRendezvous(nonce=nonce, rank=rank, size=mesh.size), str(folder))
        self.group = ReplicaProcessGroup(torch.device("cpu"), self.replica)
        self.generation = 0

    def build(self) -> None:
        self.generation += 1
        spec = GroupSpec(
            generation=self.generation,
            nonce=f"nonce{self.generation}",
            rank=self.rank,
            size=SIZE,
            store_host="127.0.0.1",
            store_port=self.ports[self.generation % len(self.ports)],
            store_key=SecretKey(b"k" * 32).text,
        )
        self.group.build(spec, superseded=lambda: False, timeout_s=300.0)

    @property
    def parts(self) -> int:
        return SIZE // self.mesh.size * self.mesh.data_size

    @property
    def part(self) -> int:
        own = self.mesh.data_position(self.rank % self.mesh.size)
        return self.rank // self.mesh.size * self.mesh.data_size + own

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        shard = self.replica.device_mesh["shard"]
        for block in model.children():
            fully_shard(block, mesh=shard, **options)
        fully_shard(model, mesh=shard, **options)
        return model


def model_of(**options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options).double()


def samples(step: int, part: int) -> torch.Tensor:
    torch.manual_seed(100 * step + part)
    return torch.randn(SHARES[part], 6, dtype=torch.float64)


def unsharded(steps: list[int], parts: int) -> Gradients:
    """Gradients of the sum of the mean losses of all steps."""
    model = model_of()
    for step in steps:
        x = torch.cat([samples(step, part) for part in range(parts)])
        model(x).square().sum(1).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward(at: Rank, module: nn.Module, step: int) -> None:
    module(samples(step, at.part)).square().sum(1).mean().backward()


def weight(at: Rank) -> float:
    return SHARES[at.part] / sum(SHARES[: at.parts])


def difference(module: nn.Module, expected: Gradients) -> float:
    found = {name: full(p.grad) for name, p in module.named_parameters()}
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def full(gradient: Any) -> torch.Tensor:
    whole: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def one_step(at: Rank, module: nn.Module, wrapped: ShardedModule) -> float:
    wrapped.enter_world()
    wrapped.begin_step(weight(at))
    backward(at, module, 0)
    assert wrapped.reduction.is_done
    return difference(module, unsharded([0], at.parts))


def accumulated(at: Rank, module: nn.Module, *, is_synced: bool) -> float:
    wrapped = ShardedModule(module, at.group)
    wrapped.enter_world()
    wrapped.begin_step(weight(at))
    if not is_synced:
        module.set_requires_gradient_sync(False)  # type: ignore[operator]
    backward(at, module, 0)
    module.set_requires_gradient_sync(True)  # type: ignore[operator]
    backward(at, module, 1)
    return difference(module, unsharded([0, 1], at.parts))


def abort(at: Rank) -> dict[str, Any]:
    """Abort the world on the first rank only; return what each rank observes, and its next step."""
    module = at.shard(model_of())
    wrapped = ShardedModule(module, at.group)
    wrapped.enter_world()
    wrapped.begin_step(weight(at))
    module.set_requires_gradient_sync(False)  # type: ignore[operator]
    backward(at, module, 1)  # kept by FSDP: must not be in the gradients of the next attempt
    module.set_requires_gradient_sync(True)  # type: ignore[operator]
    if at.rank == 0:
        nccl_semantics.control.failing_aborts = 1  # the end of the world must abort it again
        at.group.abort()
    if at.rank == at.mesh.size and at.replica.backend == nccl_semantics.NAME:
        # Its peer at this position is rank 0. Unlike gloo's connections, a communicator does not
        # report a remote abort: the agent does.
        threading.Timer(0.5, at.group.abort).start()
    raised = ""
    try:
        backward(at, module, 0)
    except GroupAborted:
        raised = "GroupAborted"
    except RuntimeError as error:
        is_of_group = "gloo" in str(error) or "communicator was aborted" in str(error)
        raised = "a peer is gone" if is_of_group else repr(error)
    wrapped.leave_world()
    module.zero_grad()
    at.group.abort()
    across = at.group.across
    assert across is not None
    at.group.destroy(is_for_next=True)
    is_open = at.replica.backend == nccl_semantics.NAME and not across.backend.is_aborted
    at.build()
    return {"raised": raised, "then": one_step(at, module, wrapped), "is_open": is_open}


def asked(at: Rank) -> list[Any]:
    """Only the first rank sets the first flag; return what each rank observes, and again after
    another collective of the replica.
    """
    module = at.shard(model_of())
    wrapped = ShardedModule(module, at.group)
    at.replica.question = lambda: (at.rank == 0, False)
    one_step(at, module, wrapped)
    known = [at.replica.take_answers(), at.replica.take_answers()]
    module.zero_grad()
    one_step(at, module, wrapped)
    at.replica.any(False)
    known.append(at.replica.take_answers())
    at.replica.question = None
    return known


def refusals(at: Rank) -> list[str]:
    """The beginning of the error message for each rejected module."""
    partly = model_of()
    fully_shard(partly.first, mesh=at.replica.device_mesh["shard"])
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    parallel = parallelize_module(model_of(), at.replica.device_mesh["shard"], plan)
    cases: list[Callable[[], nn.Module]] = [lambda: parallel, lambda: partly]
    reasons = []
    for make in cases:
        try:
            ShardedModule(make(), at.group)
        except ConfigError as error:
            reasons.append(str(error).partition(":")[0].partition(",")[0])
    return reasons


def tensor_parallel(at: Rank) -> float:
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    module = parallelize_module(model_of(), at.replica.device_mesh["tp"], plan)
    module = at.shard(module)
    whole = model_of()
    return max(
        one_step(at, module, ShardedModule(module, at.group)),
        one_step(at, whole, ShardedModule(whole, at.group)),
    )


def tensor_parallel_alone(at: Rank) -> dict[str, float]:
    """Two replicas of two ranks that see the same samples, and what scripts do to such modules."""
    found = {}
    module, wrapped = split_layers(at)
    found["one pass"] = one_step(at, module, wrapped)
    backward(at, module, 1)
    found["two passes"] = difference(module, unsharded([0, 1], at.parts))
    wrapped.begin_step(weight(at))
    module.zero_grad(set_to_none=False)
    backward(at, module, 0)
    found["kept gradients"] = difference(module, unsharded([0], at.parts))
    module.zero_grad()
    module.last.requires_grad_(False)
    backward(at, module, 0)
    found["frozen later"] = difference(module.first, part_of(unsharded([0], at.parts), "first."))

    module, wrapped = split_layers(at, frozen=True)
    wrapped.enter_world()
    wrapped.begin_step(weight(at))
    module.requires_grad_(True)
    backward(at, module, 0)
    found["unfrozen later"] = difference(module, unsharded([0], at.parts))

    module, wrapped = split_layers(at)
    module.last.load_state_dict(module.last.state_dict(), assign=True)
    found["replaced"] = one_step(at, module, wrapped)
    module.first.load_state_dict(module.first.state_dict(), assign=True)
    module.zero_grad()
    backward(at, module, 0)
    found["replaced in a step"] = difference(module, unsharded([0], at.parts))

    module, wrapped = split_layers(at)
    wrapped.enter_world()
    wrapped.begin_step(weight(at))
    x = module.first(samples(0, at.part)).tanh()
    wrapped.reduction.forward_begins()
    checkpoint(module.last, x, use_reentrant=True).square().sum(1).mean().backward()
    found["recomputed"] = difference(module, unsharded([0], at.parts))
    return found


def split_layers(at: Rank, *, frozen: bool = False) -> tuple[Any, ShardedModule]:
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    module = parallelize_module(model_of(), at.replica.device_mesh["tp"], plan)
    module.requires_grad_(not frozen)
    return module, ShardedModule(module, at.group)


def part_of(gradients: Gradients, prefix: str) -> Gradients:
    return {n.removeprefix(prefix): g for n, g in gradients.items() if n.startswith(prefix)}


def sharded_cases(at: Rank) -> dict[str, Any]:
    def step(module: nn.Module) -> float:
        return one_step(at, module, ShardedModule(module, at.group))

    mixed = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return {
        "plain": step(at.shard(model_of())),
        "activation checkpointing": step(at.shard(model_of(recompute=True))),
        "mixed precision": step(at.shard(model_of(), mp_policy=mixed)),
        "held whole": step(model_of()),
        "not resharded": step(at.shard(model_of(), reshard_after_forward=False)),
        "two passes": accumulated(at, at.shard(model_of()), is_synced=True),
        "two passes, one reduction": accumulated(at, at.shard(model_of()), is_synced=False),
        "asked": asked(at),
        "refused": refusals(at),
        "abort": abort(at),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mesh", nargs="+", required=True)
    parser.add_argument("--backend", required=True)
    options = parser.parse_args()
    if options.backend == nccl_semantics.NAME:
        nccl_semantics.use_by_default()
    mesh = ReplicaMesh.parse(dict.fromkeys(options.mesh, 2))
    at = Rank(options.rank, options.ports, options.folder, mesh, options.backend)
    at.build()
    if options.mesh == ["shard"]:
        result = sharded_cases(at)
    elif options.mesh == ["tp"]:
        result = tensor_parallel_alone(at)
    else:
        result = {"both": tensor_parallel(at)}
    at.group.destroy()
    print(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
