"""Restores a new world's state: the newest checkpoint, else rank 0's initial state.

Rank 0 removes leftovers, chooses and verifies the checkpoint; the other ranks receive its name. A
failure of one rank is raised on all, so that none waits in a collective.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from checkpoints import CheckpointInfo, LoadResult
from checkpoints.format.state_tree import Node, flatten, unflatten
from checkpoints.tensors.dtensors import is_dtensor
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import CheckpointRequired, TrainingError
from elastic.events import StateRestored
from elastic.process_group import broadcast_json, broadcast_tensors, peer_group, world_group
from elastic.telemetry.journal import EventSink
from elastic.training.checkpointing.folder import RestoreSource
from elastic.training.checkpointing.saver import Saver
from elastic.training.gradients.sharding import local_value
from elastic.training.state.all_ranks import on_all_ranks
from elastic.training.state.job_state import JobState
from elastic.world.world import World


def restore(
    world: World, job: JobState, saver: Saver, journal: EventSink, *, may_begin: bool = True
) -> int:
    """Give all ranks the same state. Returns the generation with which the job continues.

    It is the world's, or a later one if the checkpoint folder already contains it. Without a
    checkpoint, all ranks get rank 0's initial state if ``may_begin``; otherwise CheckpointRequired
    is raised.
    """
    began_s = SYSTEM_CLOCK.monotonic()
    on_all_ranks(world, lambda: saver.check_writable(world))
    found = on_all_ranks(world, lambda: saver.resolve(world) if world.rank == 0 else None)
    source = RestoreSource(**broadcast_json(vars(found) if found is not None else None))
    if saver.folder is not None and source.is_recorded:
        saver.folder.check_shared(world.rank, source.generation)
    origin = None
    if source.name is None:
        if not may_begin:
            raise CheckpointRequired(
                "a fault interrupted an update or a transfer of the weights on every rank that had "
                "them, and there is no checkpoint to resume from",
                hint="pass elastic.join(checkpoints=…) a folder that all nodes share",
            )
        _share_initial(world, job)
    else:
        origin = _load(world, job, saver, source.name)
    saver.resume(origin, source.generation, job.progress.step)
    name, took_s = source.name or "initial", SYSTEM_CLOCK.monotonic() - began_s
    journal.emit(
        StateRestored(source=name, step=job.progress.step, duration_s=round(took_s, 4)),
        level=logging.INFO if world.rank == 0 else logging.DEBUG,
    )
    return source.generation


def _load(world: World, job: JobState, saver: Saver, name: str) -> CheckpointInfo:
    def read_and_check() -> LoadResult:
        loaded = saver.load(name, job)
        job.check(loaded.state, f"checkpoint {name}")
        return loaded

    loaded = on_all_ranks(world, read_and_check)
    on_all_ranks(world, lambda: job.apply(loaded.state))
    return loaded.info


def _share_initial(world: World, job: JobState) -> None:
    """Send rank 0's complete state to all ranks; with pipeline stages, each position of the first
    replica sends its own."""
    has_stages = world.mesh.stages > 1
    group = peer_group() if has_stages else world_group()
    source = world.rank_in_replica if has_stages else 0
    node, every = on_all_ranks(world, lambda: flatten(job.tree()))
    plan = broadcast_json(_plan(node, every), group=group)
    on_all_ranks(world, lambda: _check_same_model(world, source, plan["specs"], every))
    # run.build creates equal objects on all ranks, and no rank has another rank's shards.
    own = {n for n, t in every.items() if is_dtensor(t)} if job.built is not None else set()
    tensors = {name: t for name, t in every.items() if name not in own}
    specs = {name: spec for name, spec in plan["specs"].items() if name not in own}
    modules = {
        name: local_value(t)
        for name, t in tensors.items()
        if name.startswith("model/") or is_dtensor(t)
    }
    broadcast_tensors(modules, group=peer_group())  # shards come from the first replica
    is_source = world.rank == source
    small = _non_parameter_tensors(specs, tensors, is_source=is_source)
    broadcast_tensors(small, group=group)
    if not is_source:
        tree = unflatten(plan["tree"], lambda path, name: small.get(name, every.get(name)))
        on_all_ranks(world, lambda: job.apply_non_parameters(tree))
    else:
        on_all_ranks(world, lambda: None)


def _plan(node: Node, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    specs = {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()}
    return {"tree": node, "specs": specs}


def _check_same_model(
    world: World, source: int, specs: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    expected = {n: s for n, s in specs.items() if n.startswith("model/")}
    actual = {n: s for n, s in _plan({}, tensors)["specs"].items() if n.startswith("model/")}
    differing = sorted(n for n in expected.keys() | actual if expected.get(n) != actual.get(n))
    if differing:
        raise TrainingError(
            f"rank {world.rank} has a different model from rank {source}: "
            f"{', '.join(differing[:10])}",
            hint="every rank must build the same model"
            if world.mesh.stages == 1
            else "ranks at the same place in their replicas (run.world.rank_in_replica) must build "
            'the same stage: choose it by run.mesh["pp"].get_local_rank()',
        )


def _non_parameter_tensors(
    specs: dict[str, Any], tensors: dict[str, torch.Tensor], *, is_source: bool
) -> dict[str, torch.Tensor]:
    """CPU copies of tracked tensors: values on the source, buffers to receive them on others."""
    names = [
        name
        for name in specs
        if not name.startswith("model/") and not (name in tensors and is_dtensor(tensors[name]))
    ]
    if is_source:
        return {name: tensors[name].cpu() for name in names}
    return {
        n: torch.empty(specs[n][1], dtype=getattr(torch, specs[n][0]), device="cpu") for n in names
    }
