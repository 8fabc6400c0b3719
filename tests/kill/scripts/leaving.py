"""A training script that stops at a moment of its life, ``--moment``, in its third epoch.

An epoch has ten steps. At the moment, each rank writes ``at-RANK`` into the folder and blocks for
minutes, once per job. The moments are those of a user's script; see MOMENTS. At these, others act:

- "recovery": the last rank dies in step 25, and its replacement blocks in its import, as rank 0;
- "joining": the ranks block in an evaluation, and a node that joins then in its import, as
  ``at-joining``;
- "save in flight": the ranks block in an evaluation, while the save of step 25 waits for the file
  ``release``, as ``at-save``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from job_arguments import job_parser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from checkpoints import EverySteps, LocalStorage
from checkpoints.testing import FaultyStorage

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
    "torch.compile",
    "save in flight",
    "recovery",
    "joining",
)
EPOCHS, STEPS = 4, 10
BLOCKED_S = 300.0
parser = job_parser()
parser.add_argument("--moment", default="")
options = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))


def block(moment: str, name: str = "") -> None:
    """Block for minutes if it is the moment, unless an earlier start has."""
    marker: Path = options.folder / f"at-{name or rank}"
    if options.moment != moment or marker.exists():
        return
    marker.touch()
    until = time.monotonic() + BLOCKED_S
    while time.monotonic() < until:
        time.sleep(0.1)


def die_once() -> None:
    died: Path = options.folder / "died"
    if options.moment == "recovery" and rank == run.world.size - 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_release(label: str) -> None:
    """Called before each call of the disk."""
    release: Path = options.folder / "release"
    is_write = label.startswith("write ") and "safetensors" in label
    if is_write and options.moment == "save in flight" and rank == 0:
        (options.folder / "at-save").touch()
        while not release.exists():
            time.sleep(0.02)


block("import")
if (options.folder / "died").exists():
    block("recovery", "0")
if (options.folder / "at-0").exists():
    block("joining", "joining")
torch.manual_seed(0)
run = elastic.join(
    checkpoints=FaultyStorage(
        LocalStorage(options.folder / "checkpoints"), before=wait_for_release
    ),
    when=EverySteps(25 if options.moment == "save in flight" else 100_000),
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
            die_once()
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
    block("joining")
    block("save in flight")
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


def slow_compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
    block("torch.compile")
    return graph.forward


compiled_loss = torch.compile(nn.functional.mse_loss, backend=slow_compiler)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """From step 25 on compiled, if that is the moment."""
    is_compiled = options.moment == "torch.compile" and is_late()
    return (compiled_loss if is_compiled else nn.functional.mse_loss)(outputs, targets)


def epochs() -> Iterator[int]:
    for epoch in run.epochs(EPOCHS):
        yield epoch
        evaluate(epoch)


def train() -> None:
    model_steps[0] = run.state.setdefault("steps", 0)
    for epoch in epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
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
