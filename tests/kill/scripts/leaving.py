"""A training script that stops at a moment of its life, ``--moment``, in its third epoch.

An epoch has ten steps. At the moment, each rank writes ``at-RANK`` into the folder and blocks for
minutes, once per job. The moments are those of a user's script; see MOMENTS.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from job_arguments import job_parser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from checkpoints import EverySteps

MOMENTS = (
    "import",
    "join",
    "data",
    "forward",
    "compile",
    "evaluation",
    "evaluation on rank 0",
    "evaluation of averaged weights",
    "callback",
    "averaged weights without copies",
    "last step",
    "last step without copies",
)
EPOCHS, STEPS = 4, 10
BLOCKED_S = 300.0
parser = job_parser()
parser.add_argument("--moment", default="")
options = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))


def block(moment: str) -> None:
    """Block for minutes if it is the moment, unless an earlier start has."""
    marker: Path = options.folder / f"at-{rank}"
    if options.moment != moment or marker.exists():
        return
    marker.touch()
    until = time.monotonic() + BLOCKED_S
    while time.monotonic() < until:
        time.sleep(0.1)


block("import")
torch.manual_seed(0)
run = elastic.join(
    checkpoints=options.folder / "checkpoints",
    when=EverySteps(100_000),
    seed=7,
    step_copies="never" if options.moment.endswith("without copies") else "always",
)


class Data(TensorDataset):
    """Reading the sample that is marked blocks."""

    def __getitem__(self, index: Any) -> Any:
        if run_step() == 2 * STEPS + 5:
            block("data")
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    """Its forward pass blocks on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        if is_late():
            block("forward")
            block("compile")  # (a compiler runs within the first forward pass)
        return self.layer(x)


def run_step() -> int:
    return model_steps[0]


def is_late() -> bool:
    return model_steps[0] >= 2 * STEPS + 5


model_steps = [0]
model = run.wrap(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.track(optimizer=optimizer)
x = torch.randn(STEPS * 12, 3)
loader = run.loader(DataLoader(Data(x, x.sum(1, keepdim=True)), batch_size=12), global_batch=12)


def count(step: elastic.Step) -> None:
    model_steps[0] = step.number + 1
    if is_late():
        block("callback")


def evaluate(epoch: int) -> None:
    if epoch != 2:
        return
    block("evaluation")
    if rank == 0:
        block("evaluation on rank 0")
    weights = list(model.parameters())
    copies = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.mul_(0.5)  # torch does not count this change
    block("evaluation of averaged weights")
    block("averaged weights without copies")
    for weight, copy in zip(weights, copies, strict=True):
        weight.data.copy_(copy)


def epochs() -> Iterator[int]:
    for epoch in run.epochs(EPOCHS):
        yield epoch
        evaluate(epoch)


def train() -> None:
    model_steps[0] = run.state.setdefault("steps", 0)
    for epoch in epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            run.state["steps"] += 1
            if epoch == EPOCHS - 1 and loader.index == STEPS - 1:
                block("last step")
                block("last step without copies")


if options.moment == "join":
    block("join")
run.after_step(count)
run.retry(train)
