"""Lightning Fabric with recovery in process ::

    -fabric = Fabric(precision="bf16-mixed")
    +run = elastic.join(checkpoints="/mnt/shared/job")
    +fabric = ElasticFabric(run=run, precision="bf16-mixed")
     fabric.launch()
     model, optimizer = fabric.setup(model, optimizer)
     loader = fabric.setup_dataloaders(loader)

    +def train():
    -    for epoch in range(3):
    +    for epoch in run.epochs(3):
             for batch in loader:
                 …

    +run.retry(train)

Modules are wrapped by ``run.wrap``; optimizers, their scheduler and the scaler are tracked. A
loader is divided by ``run.loader`` in training, in the order of Fabric's own sampler on the largest
world, and by ``run.shard`` in evaluation.

No private names of Fabric are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import elastic
from elastic.errors import ConfigError
from elastic.groups.world import World
from elastic.integrations.prepared import PreparedLoader, batches_of, is_training, weighted
from elastic.train.loader import Ordering
from elastic.train.run import Run

try:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.utilities.apply_func import move_data_to_device
    from lightning.fabric.utilities.rank_zero import rank_zero_only
except ImportError as absent:
    raise ConfigError(
        f"elastic.integrations.fabric needs Lightning: {absent}",
        hint="pip install 'torch-elastic-harness[lightning]'",
    ) from absent


__all__ = ["ElasticFabric"]


class _Environment(TorchElasticEnvironment):
    """The ranks of the current world; before the first one, those of the largest."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def global_rank(self) -> int:
        if self._run.has_world:
            return self._run.world.rank
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))

    def world_size(self) -> int:
        return self._run.world.size if self._run.has_world else self._run.largest_world

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Any number of nodes is right: it changes."""


class _Strategy(DDPStrategy):
    """DDP by ``run.wrap``, and optimizers that are tracked."""

    def __init__(self, run: Run, **kwargs: Any) -> None:
        super().__init__(cluster_environment=_Environment(run), **kwargs)
        self._run, self._options = run, kwargs
        self.modules: list[nn.Module] = []
        self._optimizers = 0
        run.on_world(_set_rank)

    def setup_module(self, module: nn.Module) -> Any:
        if not any(p.requires_grad for p in module.parameters()):
            return module
        wrapped = self._run.wrap(module, **self._options)
        self.modules.append(wrapped)
        return wrapped

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None and not self._optimizers:
            self._run.track(scaler=scaler)
        named: dict[str, Any] = {f"optimizer{self._optimizers}": optimizer}
        self._run.track(**named)
        self._optimizers += 1
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], *scheduler: Any
    ) -> Any:
        """``scheduler``: at most one; versions before 2.6 pass none."""
        for each in scheduler:
            if each is not None:
                self._run.track(**{f"scheduler{self._optimizers}": each})
        return super().setup_module_and_optimizers(module, optimizers, *scheduler)


def _set_rank(world: World) -> None:
    """Let messages and files of rank 0 be those of the world's."""
    rank_zero_only.rank = world.rank


class _Loader(PreparedLoader):
    def __init__(
        self, fabric: ElasticFabric, given: DataLoader[Any], *, is_fabrics_order: bool, moves: bool
    ) -> None:
        self._fabric, self._moves = fabric, moves
        run = fabric.elastic
        order: Ordering | None = None
        own = (
            _order(given, run.largest_world, fills_up=bool(fabric.division))
            if is_fabrics_order
            else None
        )
        if own is not None:
            order = own if not fabric.division else batches_of(own, given, run.largest_world)
        super().__init__(run, given, lambda: run.loader(given, order=order, **fabric.division))

    def trains(self) -> bool:
        return is_training(self._fabric.modules)

    def training(self) -> Iterator[Any]:
        # Each has one `yield` for each step: the script's `enumerate` continues its count.
        return self._whole_batches() if self._fabric.division else super().training()

    def _whole_batches(self) -> Iterator[Iterator[Any]]:
        for step in self._run.steps(self.job_loader):
            yield self._batches_of(step)

    def _batches_of(self, step: elastic.Step) -> Iterator[Any]:
        """This rank's batches in the place of one."""
        try:
            for batch in step:
                self._fabric.weight = self.job_loader.share.mean_weights[step.micro_batch]
                yield self.to_device(batch)
        finally:
            self._fabric.weight = 1.0

    def to_device(self, batch: Any) -> Any:
        return move_data_to_device(batch, self._fabric.device) if self._moves else batch

    def evaluation(self) -> Any:
        return _Moved(self._run.shard(self._given), self.to_device)


class _Moved:
    def __init__(self, loader: DataLoader[Any], to_device: Callable[[Any], Any]) -> None:
        self._loader, self._to_device = loader, to_device

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._to_device, self._loader)


def _order(
    given: DataLoader[Any], ranks: int, *, fills_up: bool
) -> Callable[[int], list[int]] | None:
    """The samples of DistributedSampler, with which Fabric replaces the usual samplers, in the
    order in which the ranks of the largest world read them together. None: another sampler's.
    ``fills_up``: all ranks have equally many, as there."""
    if type(given.sampler) not in (RandomSampler, SequentialSampler) or ranks == 1:
        return None
    if not hasattr(given.dataset, "__len__"):
        return None
    everything: DistributedSampler[Any] = DistributedSampler(
        given.dataset,
        num_replicas=1,
        rank=0,
        shuffle=isinstance(given.sampler, RandomSampler),
        seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
    )

    def order(epoch: int) -> list[int]:
        everything.set_epoch(epoch)
        indices = list(everything)
        missing = -len(indices) % ranks if fills_up else 0
        return indices + (indices * ranks)[:missing]

    return order


class ElasticFabric(Fabric):
    """A ``Fabric`` whose processes are those of the current world.

    ``run``: what ``elastic.join()`` has returned; without one, it joins with the defaults. All
    other arguments are those of ``Fabric``, except that ``strategy`` is DDP; ``ddp`` are options of
    DistributedDataParallel. Raises ConfigError for another strategy.

    ``whole_batches``: a rank gets whole batches of the largest world, for a loss that is not a mean
    over samples. In a smaller world it has several in the place of one, so that a loader yields an
    iterator over them in training: ``for batches in loader: for batch in batches: …``. Gradients
    are reduced with the last one.
    """

    def __init__(
        self,
        *,
        run: Run | None = None,
        strategy: str = "ddp",
        ddp: dict[str, Any] | None = None,
        whole_batches: bool = False,
        **kwargs: Any,
    ) -> None:
        if strategy not in ("auto", "ddp"):
            raise ConfigError(
                f"ElasticFabric(strategy={strategy!r}): only DDP recovers in process under Fabric",
                hint='strategy="ddp"; or plain Fabric, which recovers by a restart',
            )
        self.elastic = elastic.join() if run is None else run
        self.division: dict[str, Any] = {}
        """How a loader divides batches, as options of ``run.loader``."""
        if whole_batches:
            self.division = {"weights": "equal", "whole_batches": True}
        self.weight = 1.0  # of the current batch's loss
        kwargs.setdefault("accelerator", self.elastic.device.type)
        kwargs.setdefault("devices", int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self._ddp = _Strategy(self.elastic, **(ddp or {}))
        super().__init__(strategy=self._ddp, **kwargs)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are trained."""
        return self._ddp.modules

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader[Any],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
    ) -> Any:
        prepared = [
            _Loader(self, each, is_fabrics_order=use_distributed_sampler, moves=move_to_device)
            for each in dataloaders
        ]
        return prepared[0] if len(prepared) == 1 else prepared

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """See Fabric."""
        super().backward(weighted(tensor, self.weight), *args, **kwargs)

    def epochs(self, count: int) -> Iterator[int]:
        """``run.epochs(count)``."""
        return self.elastic.epochs(count)

    def retry(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``run.retry(fn, …)``."""
        return self.elastic.retry(fn, *args, **kwargs)
