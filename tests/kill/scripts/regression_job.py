"""Shared parts of scripts that hang or slow down on demand: arguments, data, model, shutdown."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from job_arguments import job_parser
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset

import elastic
from elastic.testing.pacing import pause_after_step

Rows = Dataset[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class JobArguments:
    """The arguments that a Workload passes to every script."""

    folder: Path
    samples: int
    batch: int
    epochs: int
    step_s: float
    save_every: int

    @classmethod
    def read(cls) -> JobArguments:
        """From the command line."""
        return cls(**vars(job_parser().parse_args()))

    @property
    def hurry(self) -> Path:
        """The file that exists once the test has no more faults for the job."""
        return self.folder / "hurry"

    def pause_after_step(self, epoch: int) -> None:
        """Make the step as long as the test requests."""
        pause_after_step(self.hurry, self.step_s, epoch / self.epochs)


class Waves(Rows):
    """Synthetic regression; ``on_read`` is called before each sample is read."""

    def __init__(self, n: int, on_read: Callable[[], None]) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 8, dtype=torch.float64, generator=generator)
        self.y = (self.x @ torch.randn(8, 1, dtype=torch.float64, generator=generator)).tanh()
        self.on_read = on_read

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.on_read()
        return self.x[index], self.y[index]


def join(arguments: JobArguments) -> elastic.Run:
    """Join the run, which saves every ``save_every`` steps."""
    torch.manual_seed(0)
    return elastic.join(
        checkpoints=elastic.Checkpoints(
            folder=os.environ["ELASTIC_CHECKPOINTS"], when=arguments.save_every
        )
    )


def network(*, within: nn.Module | None = None, last: nn.Module | None = None) -> nn.Sequential:
    """A small network for Waves, with a layer of the script inside it, or last."""
    layers = [nn.Linear(8, 16), nn.Tanh(), within, nn.Linear(16, 1), last]
    return nn.Sequential(*(layer for layer in layers if layer is not None)).double()


def save_weights(run: elastic.Run, module: nn.Module, folder: Path) -> None:
    """Save the weights that the test compares with those of an undisturbed run."""
    if run.is_main:
        save_file(dict(module.state_dict()), folder / "final.safetensors")
