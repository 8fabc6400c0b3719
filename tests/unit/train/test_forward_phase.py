"""Phases of forward and backward passes, and forward passes before training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import dataset, network, run_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from elastic.hangs.page import phases
from elastic.train.folder import Checkpoints
from elastic.train.run import Run


class Watched(nn.Module):
    """Notes the phase in its forward pass and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = network(), dict[str, str]()

    def note(self, place: str) -> None:
        self.seen[place] = phases._phase.name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("forward")
        output: torch.Tensor = self.inner(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.note("backward"))  # type: ignore[no-untyped-call]
        return output


def sharded(mesh: DeviceMesh) -> Any:
    model = Watched()
    fully_shard(next(model.inner.children()), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrapped(run: Run) -> tuple[Any, torch.optim.Optimizer]:
    return tracked(run, Watched())


def wrapped_shards(run: Run) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(run.mesh["shard"])
    with torch.no_grad():
        model(torch.ones(1, 4).double())  # a test of shapes
    found = tracked(run, model)
    with torch.no_grad():
        model(torch.ones(1, 4).double())
    return found


def tracked(run: Run, module: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    model = run.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(optimizer=optimizer)
    return model, optimizer


def built(run: Run) -> tuple[Any, torch.optim.Optimizer]:
    def build(mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer]:
        model = sharded(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(torch.ones(1, 4).double())
        return model, optimizer

    model, optimizer = run.build(build)
    return model, optimizer


@pytest.mark.parametrize(
    ("way", "mesh"), [(wrapped, None), (wrapped_shards, {"shard": 1}), (built, None)]
)
def test_only_the_passes_themselves_compute(
    tmp_path: Path, way: Any, mesh: dict[str, int] | None
) -> None:
    """What the script does between them may take long, as a plot on rank 0."""
    seen: dict[str, str] = {}
    with run_of(Checkpoints(folder=tmp_path, when=1000, memory=False), mesh=mesh) as run:
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)
        made = None if way is built else way(run)

        def loop() -> None:
            model, optimizer = made or way(run)
            own = getattr(model, "module", model)
            for _ in run.epochs(1):
                for x, y in loader:
                    loss = F.mse_loss(model(x), y)
                    own.note("between")
                    loss.backward()  # type: ignore[no-untyped-call]
                    own.note("after")
                    optimizer.step()
                    optimizer.zero_grad()
            seen.update(own.seen)

        run.retry(loop)
    passes = {"forward": "COMPUTE", "backward": "COMPUTE"}
    assert seen == {**passes, "between": "SCRIPT", "after": "SCRIPT"}


def test_a_copy_of_a_wrapped_module_is_a_plain_module() -> None:
    with run_of(None, mesh={"tp": 1}, clean=False) as run:
        model = run.wrap(network())
        average = copy.deepcopy(model)
        before = phases.enter(phases._phase)
        average(torch.ones(1, 4).double()).sum().backward()
        assert phases._phase is before
