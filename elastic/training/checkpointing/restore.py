"""Restores a new world's state: the newest checkpoint, else rank 0's initial state.

Rank 0 removes leftovers and chooses the checkpoint; all ranks load it, and each verifies what it
reads. If it is damaged, all load the next older one. Any other failure of one rank is raised on
all, so that none waits in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from checkpoints import CheckpointInfo, LoadError, LoadResult, StateMismatch
from checkpoints.format.state_tree import Node, flatten, unflatten
from checkpoints.loading.reader import THREAD_NAME as READER_THREADS
from checkpoints.tensors.dtensors import is_dtensor
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import CheckpointRequired, TrainingError
from elastic.events import StateRestored
from elastic.hangs.busy import busy
from elastic.process_group import (
    all_gather_json,
    broadcast_json,
    broadcast_tensors,
    peer_group,
    world_group,
)
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
    found = on_all_ranks(world, lambda: _resolve(world, saver))
    source = RestoreSource(**broadcast_json(vars(found) if found is not None else None))
    if saver.folder is not None and source.is_recorded:
        saver.folder.check_shared(world.rank, source.generation)
    name, origin, unusable = source.name, None, dict[str, str]()
    while name is not None:
        loaded = _load(world, job, saver, name)
        if isinstance(loaded, CheckpointInfo):
            origin = loaded
            break
        unusable[name] = loaded
        name = broadcast_json(on_all_ranks(world, lambda: _choose_again(world, saver, unusable)))
    if name is None:
        if not may_begin:
            raise CheckpointRequired(
                "a fault interrupted an update or a transfer of the weights on every rank that had "
                "them, and there is no checkpoint to resume from",
                hint="pass elastic.join(checkpoints=…) a folder that all nodes share",
            )
        _share_initial(world, job)
    saver.resume(origin, source.generation, job.progress.step)
    took_s = SYSTEM_CLOCK.monotonic() - began_s
    journal.emit(
        StateRestored(
            source=name or "initial", step=job.progress.step, duration_s=round(took_s, 4)
        ),
        level=logging.INFO if world.rank == 0 else logging.DEBUG,
    )
    return source.generation


def _resolve(world: World, saver: Saver) -> RestoreSource | None:
    if world.rank > 0:
        return None
    with busy(READER_THREADS):
        return saver.resolve(world)


def _choose_again(world: World, saver: Saver, unusable: Mapping[str, str]) -> str | None:
    if world.rank > 0:
        return None
    with busy(READER_THREADS):
        return saver.choose_again(unusable)


def _load(world: World, job: JobState, saver: Saver, name: str) -> CheckpointInfo | str:
    """Load a checkpoint on all ranks. If one of them cannot read it, returns the reason, and no
    state has changed."""

    def read_and_check() -> LoadResult | LoadError:
        try:
            with busy(READER_THREADS):
                loaded = saver.load(name, job)
        except StateMismatch:
            raise  # an older one would not fit either
        except LoadError as error:
            return error
        job.check(loaded.state, f"checkpoint {name}")
        return loaded

    loaded = on_all_ranks(world, read_and_check)
    reasons = all_gather_json(loaded.message if isinstance(loaded, LoadError) else None)
    for rank, reason in enumerate(reasons):
        if reason is not None:
            return f"{reason} (found by rank {rank})"
    assert isinstance(loaded, LoadResult)
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
