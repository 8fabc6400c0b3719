"""What scripts that hang or slow down on demand have in common: arguments, data, model, end."""

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
    """What a Workload gives every script."""

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
        """There once the test has nothing left to do to the job."""
        return self.folder / "hurry"

    def pause_after_step(self, epoch: int) -> None:
        """Make the step as long as the test wants it."""
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
    """The run, which saves every so many steps."""
    torch.manual_seed(0)
    return elastic.join(
        checkpoints=elastic.Checkpoints(
            folder=os.environ["ELASTIC_CHECKPOINTS"], when=arguments.save_every
        )
    )


def network(*, within: nn.Module | None = None, last: nn.Module | None = None) -> nn.Sequential:
    """A small one for Waves, with a layer of the script's own within it, or last."""
    layers = [nn.Linear(8, 16), nn.Tanh(), within, nn.Linear(16, 1), last]
    return nn.Sequential(*(layer for layer in layers if layer is not None)).double()


def save_weights(run: elastic.Run, module: nn.Module, folder: Path) -> None:
    """What the test compares with the weights of an undisturbed run."""
    if run.is_main:
        save_file(dict(module.state_dict()), folder / "final.safetensors")
