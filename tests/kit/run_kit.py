"""A small job in this process: a world of one, real group, real checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkpoints import Root
from elastic.telemetry.journal import EventSink
from elastic.train.ddp import ElasticDDP
from elastic.train.folder import Checkpoints
from elastic.train.loader import ElasticLoader
from elastic.train.run import Components, Run, start_components
from elastic.worker.worlds import Worlds

SAMPLES = 52
STEPS_PER_EPOCH = 6  # of a global batch of 10


def dataset(samples: int = SAMPLES) -> TensorDataset:
    """Regression data that depends on nothing but the index."""
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def network(hidden: int = 8) -> nn.Module:
    """The same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()


@dataclass
class Job:
    """The objects of a script, in the order in which scripts make them."""

    run: Run
    model: ElasticDDP
    optimizer: torch.optim.Optimizer
    loader: ElasticLoader

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def train(self, epochs: int = 2, stop_after: int | None = None) -> int:
        """Train as a script would; the number of steps done. ``stop_after`` breaks off."""
        self.run.untracked("done")
        done = 0
        for _ in self.run.epochs(epochs):
            for x, y in self.loader:
                self.update(x, y)
                done += 1
                if stop_after is not None and done == stop_after:
                    break
            if done == stop_after:
                break
        parts_of(self.run).loop.end_left_loop()  # as the next loop does
        return done

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


_components: WeakKeyDictionary[Run, Components] = WeakKeyDictionary()


def parts_of(run: Run) -> Components:
    """What a run of :func:`process` or :func:`run_of` consists of."""
    return _components[run]


@contextmanager
def process(
    folder: Root | None = None,
    *,
    seed: int = 0,
    every_steps: int = 3,
    clean: bool = True,
    journal: EventSink | None = None,
    worlds: Worlds | None = None,
) -> Iterator[Run]:
    """What one process is to the job. With ``clean=False`` it ends as if it had been killed."""
    policy = Checkpoints(folder=folder, when=every_steps) if folder else None
    with run_of(policy, seed=seed, clean=clean, journal=journal, worlds=worlds) as run:
        yield run


@contextmanager
def run_of(
    policy: Checkpoints | None,
    *,
    seed: int = 0,
    clean: bool = True,
    error: str = "",
    journal: EventSink | None = None,
    worlds: Worlds | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Iterator[Run]:
    """One process with any policy; ``error`` is what ends it."""
    parts = start_components(policy, seed=seed, journal=journal, worlds=worlds, mesh=mesh)
    run = Run(parts)
    _components[run] = parts
    has_succeeded = False
    try:
        yield run
        has_succeeded = clean and not error
    finally:
        run.close(clean=has_succeeded, error=error)
        for module in parts.session.job.modules.values():
            module.leave_world()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def steps_of_job(run: Run) -> int:
    """How many steps are committed."""
    return parts_of(run).session.job.progress.step


def undo_step(run: Run) -> None:
    """What an in-process recovery does to the state of a job, without another world."""
    parts = parts_of(run)
    parts.session.progress.rollback.restore()
    parts.session.current.drop()


def job(run: Run, *, hidden: int = 8, samples: int = SAMPLES, global_batch: int | None = 10) -> Job:
    """A job on ``run``."""
    model = run.wrap(network(hidden))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(optimizer=optimizer)
    data = DataLoader(dataset(samples), batch_size=10, shuffle=True)
    return Job(run, model, optimizer, run.loader(data, global_batch=global_batch))
