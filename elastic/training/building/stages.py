"""``run.reduce_gradients``: the end of the backward passes of pipeline stages."""

from __future__ import annotations

from elastic.errors import ConfigError
from elastic.training.components import Components
from elastic.training.gradients.stages import StageReduction, reduce_stages


class ReducesStages:
    """The part of a run that reduces the gradients of pipeline stages."""

    _parts: Components

    def reduce_gradients(self) -> None:
        """With a dimension ``pp``: make all gradients those of the mean over the global batch.

        Call it on every rank, once per optimizer step, between the last backward pass and
        ``clip_grad_norm_``::

            schedule.step(x)  # on the last stage schedule.step(target=y)
            run.reduce_gradients()
            optimizer.step()

        Each stage is summed over the replicas, never over other stages. Without a dimension
        ``pp``, backward passes reduce the gradients, and this does nothing.

        Raises:
            ConfigError: the mesh has a dimension ``pp``, but this rank has wrapped no module.
            TrainingError: no backward pass has run, or its gradients are already reduced.
        """
        parts = self._parts
        if not parts.lifecycle.replica.mesh.has_stages:
            return
        reductions = [
            module.reduction
            for module in parts.job.modules.values()
            if isinstance(module.reduction, StageReduction)
        ]
        if not reductions:
            raise ConfigError(
                "run.reduce_gradients() on a rank without a module",
                hint="call run.wrap(stage) on every rank, each with its own stage",
            )
        if all(module.in_world for module in parts.job.modules.values()):
            reduce_stages(reductions)
