"""A training script that stops at a moment of its life: ``MOMENT``, in its environment.

At the moment, which comes after a few steps of each start, each rank writes the number of committed
steps into ``at-RANK`` in the folder and blocks for minutes, unless the file exists. The moments are
those of a user's script; see MOMENTS. At these, others act:

- "recovery": the last rank dies in a step, and its replacement blocks in its import, as rank 0;
- "warm-up": the ranks block in an evaluation, and a node that joins then in its import, as
  ``at-joining``;
- "save in flight": the ranks block in an evaluation, while a save waits for the file ``release``,
  as ``at-save``;
- "second signal": the ranks block in an evaluation, and the last save waits likewise.
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
    "callback",
    "evaluation",
    "evaluation on rank 0",
    "evaluation of averaged weights",
    "averaged weights without copies",
    "between epochs",
    "last step",
    "last step without copies",
    "save in flight",
    "second signal",
    "recovery",
    "warm-up",
)
STEPS = 10  # of an epoch
FEW = 5
BLOCKED_S = 300.0
options = job_parser().parse_args()
moment = os.environ.get("MOMENT", "")
epochs_of_job = int(os.environ.get("EPOCHS", "1000"))
rank = int(os.environ.get("RANK", "0"))
first_step = step_now = 0  # of this start; committed steps


def block(*moments: str, name: str = "") -> None:
    """Block for minutes if it is one of the moments, and no earlier start has."""
    marker: Path = options.folder / f"at-{name or rank}"
    if moment not in moments or marker.exists():
        return
    marker.with_suffix(".tmp").write_text(str(step_now))
    marker.with_suffix(".tmp").rename(marker)
    until = time.monotonic() + BLOCKED_S
    while time.monotonic() < until:
        time.sleep(0.1)


def die_once() -> None:
    died: Path = options.folder / "at-death"
    if moment == "recovery" and rank == run.world.size - 1 and not died.exists():
        died.write_text(str(step_now))
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_release(label: str) -> None:
    """Called before each call of the disk."""
    is_write = label.startswith("write ") and "safetensors" in label
    if is_write and moment in ("save in flight", "second signal") and rank == 0:
        (options.folder / "at-save").touch()
        while not (options.folder / "release").exists():
            time.sleep(0.02)


block("import")
if (options.folder / "at-death").exists():
    block("recovery", name="0")
if (options.folder / "at-0").exists():
    block("warm-up", name="joining")
torch.manual_seed(0)
run = elastic.join(
    checkpoints=FaultyStorage(
        LocalStorage(options.folder / "checkpoints"), before=wait_for_release
    ),
    when=EverySteps(3 if moment == "save in flight" else 100_000),
    seed=7,
    step_copies="never" if moment.endswith("without copies") else "always",
)


def is_late() -> bool:
    return step_now >= first_step + FEW


class Data(TensorDataset):
    """Reading a sample blocks on demand."""

    def __getitem__(self, index: Any) -> Any:
        if is_late():
            block("data")
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    """Its forward pass blocks on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        if is_late() and self.training:
            block("forward")
            die_once()
        elif not self.training:
            block("evaluation", "warm-up", "save in flight", "second signal")
            if rank == 0:
                block("evaluation on rank 0")
        return self.layer(x)


model = run.wrap(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.track(optimizer=optimizer)
x = torch.randn(STEPS * 12, 3)
loader = run.loader(DataLoader(Data(x, x.sum(1, keepdim=True)), batch_size=12), global_batch=12)


def count(step: elastic.Step) -> None:
    global step_now
    step_now = step.number + 1
    if is_late():
        block("callback")


def evaluate() -> None:
    model.eval()
    with torch.no_grad():
        model(x[:12])
    weights = list(model.parameters())
    copies = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.mul_(0.5)  # torch does not count this change
    block("evaluation of averaged weights", "averaged weights without copies")
    for weight, copy in zip(weights, copies, strict=True):
        weight.data.copy_(copy)
    model.train()  # type: ignore[no-untyped-call]


def slow_compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
    block("compile")
    return graph.forward


loss_of = compiled = nn.functional.mse_loss
if moment == "compile":  # torch's compiler takes seconds to import
    compiled = torch.compile(loss_of, backend=slow_compiler)


def epochs() -> Iterator[int]:
    for epoch in run.epochs(epochs_of_job):
        yield epoch
        if is_late():
            evaluate()
            block("between epochs")


def train() -> None:
    global first_step, step_now
    first_step = step_now = run.state.setdefault("steps", 0)
    for epoch in epochs():
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = (compiled if is_late() else loss_of)(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            run.state["steps"] += 1
            if epoch == epochs_of_job - 1 and loader.index == STEPS - 1:
                block("last step", "last step without copies")


block("join")
run.after_step(count)
run.retry(train)
