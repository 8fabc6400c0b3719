"""``run.build``: objects that are created in each world, on a DeviceMesh of that world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic import torch_private
from elastic.errors import ConfigError, TrainingError
from elastic.training.components import Components
from elastic.training.data.randomness import derive_seed, seed_all
from elastic.training.rebuilding import garbage
from elastic.training.rebuilding.built import AGAIN, Built

T = TypeVar("T")

MESH_DIM = "shard"
_SEED = 0x6275696C64  # for random numbers in the function: equal on all ranks and in all worlds


class BuildsInWorlds:
    """The part of a run that rebuilds objects in each world."""

    _parts: Components

    def build(self, fn: Callable[[DeviceMesh], T]) -> T:
        """Call ``fn`` with a DeviceMesh of the current world, and return its result.

        For models that are sharded over the whole world, so that no rank has a full copy (FSDP2)::

            def build(mesh):
                model = Net()
                fully_shard(model, mesh=mesh)
                return model, torch.optim.AdamW(model.parameters())

            def train():
                model, optimizer = run.build(build)
                for epoch in run.epochs(3):
                    for x, y in loader: …

            run.retry(train)

        ``mesh`` has one dimension, ``shard``, of the world's size. ``fn`` returns a module, or a
        tuple, list or dict of modules, optimizers and other objects with state; all of it is part
        of the job's state, and is loaded before the first loop: surviving ranks contribute only
        the shards in their nodes' memory. Random numbers in ``fn`` are the same on all ranks
        and in all worlds. Gradients are those of the mean over the global batch, even if ranks
        have different numbers of samples.

        When the world changes, ``run.retry`` calls its function again, which must call this again.
        Using an object of an earlier world raises TrainingError.

        Raises:
            ConfigError: the result of ``fn`` is not sharded over ``mesh``, or cannot be saved; or
                the job has no checkpoints, or has a wrapped module.
            TrainingError: called outside of ``run.retry``, twice in a world, or too late.
        """
        parts = self._parts
        job, lifecycle = parts.job, parts.lifecycle
        self._check_call()
        parts.attempts.check_registration("build")
        job.is_rebuilt = True
        parts.checkpoints.keep_shards_in_memory()
        world = parts.recovery.bootstrap.enter_world()
        if (remains := job.remains) is not None:
            remains.warn_if_in_memory()
        device = parts.connectivity.group.device
        mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=(MESH_DIM,))
        seed_all(derive_seed(job.seed, _SEED))
        garbage.freeze_older_objects()
        torch_private.forget_meshes()  # the script may have used objects of an ended world since
        with torch.enable_grad():
            returned = fn(mesh)
        parts.state.registry.hold(Built(returned, mesh, generation=lifecycle.world.generation))
        return returned

    def _check_call(self) -> None:
        parts = self._parts
        job = parts.job
        if not parts.script.scope.in_retry:
            raise TrainingError(
                "run.build() was called outside the function that run.retry calls: its result "
                "belongs to one world, and each world needs a new one",
                hint=AGAIN,
            )
        if job.built is not None:
            raise TrainingError(
                "run.build() was called twice in one world",
                hint="return all models and optimizers from one function: "
                "return model, critic, optimizer, critic_optimizer",
            )
        if parts.lifecycle.is_restored:
            raise TrainingError(
                "run.build() is called too late: the job's state is already restored",
                hint="call run.build() first in the function that run.retry calls: before "
                "run.state, run.world, run.is_main, run.epochs and the loader are read",
            )
        if job.is_sharded:
            raise ConfigError(
                "run.build() cannot be used with elastic.join(mesh=…): a replica keeps its model",
                hint="use run.wrap(fully_shard(model, mesh=run.mesh)), or omit mesh=",
            )
        if job.modules:
            raise ConfigError(
                "run.build() cannot be used in a job that calls run.wrap()",
                hint="return all modules, sharded, from the function of run.build(); or wrap all",
            )
        if not parts.checkpoints.is_on:
            raise ConfigError(
                "run.build() needs checkpoints: no rank holds the complete state, so a rank's "
                "death would lose it",
                hint='elastic.join(checkpoints="/shared/folder"); the newest checkpoints are also '
                "kept in the nodes' memory",
            )
