"""Unreduced gradients of FSDP2 (``set_requires_gradient_sync``) keep a step open."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import dataset, network, parts_of, run_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from elastic.errors import TrainingError
from elastic.train.folder import Checkpoints
from elastic.train.run import Run

SAME, MIXED = MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float32, torch.float64)
ModelAndOptimizer = tuple[Any, torch.optim.Optimizer]


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> ModelAndOptimizer:
    model: Any = fully_shard(network(), mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def wrapped(run: Run, policy: MixedPrecisionPolicy) -> Callable[[], ModelAndOptimizer]:
    model, optimizer = sharded(run.mesh["shard"], policy)
    run.wrap(model)
    run.track(optimizer=optimizer)
    return lambda: (model, optimizer)


def built(run: Run, policy: MixedPrecisionPolicy) -> Callable[[], ModelAndOptimizer]:
    return lambda: run.build(lambda mesh: sharded(mesh, policy))


@pytest.mark.parametrize("policy", [SAME, MIXED], ids=["same", "mixed"])
@pytest.mark.parametrize(("way", "mesh"), [(wrapped, {"shard": 1}), (built, None)])
def test_a_step_stays_open_until_its_gradients_are_reduced(
    tmp_path: Path, way: Any, mesh: dict[str, int] | None, policy: MixedPrecisionPolicy
) -> None:
    """A save or a return between two steps that share gradients would lose the first step's."""
    opened = []
    with run_of(Checkpoints(folder=tmp_path, when=1, memory=False), mesh=mesh) as run:
        parts, make = parts_of(run), way(run, policy)
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)

        def loop() -> None:
            model, optimizer = make()
            for _ in run.epochs(1):
                for number, (x, y) in enumerate(loader, start=1):
                    opened.append(parts.session.current.accumulation.since)
                    model.set_requires_gradient_sync(number % 2 == 0)
                    (F.mse_loss(model(x), y) / 2).backward()  # type: ignore[no-untyped-call]
                    if number % 2 == 0:
                        optimizer.step()
                        optimizer.zero_grad()

        run.retry(loop)
    assert opened == [None, 0, None, 2, None, 4]


def test_changed_shares_within_one_reduction_are_rejected(tmp_path: Path) -> None:
    with run_of(None, mesh={"shard": 1}, clean=False) as run:
        model, _ = wrapped(run, SAME)()
        module = parts_of(run).session.job.modules["model"]
        module.begin_step(1.0)
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4).double()).sum().backward()
        module.begin_step(1.0)
        with pytest.raises(TrainingError, match=re.escape("(0.5, before 1): the last batch")):
            module.begin_step(0.5)


def of_dtensors(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def of_shards(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().clamp_(-0.1, 0.1)


@pytest.mark.parametrize("change", [of_dtensors, of_shards])
def test_weight_changes_by_the_script_are_detected_in_any_step(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    """Not only in steps in which contents are compared: 0, 1, 2, 4, 8, …"""
    learned = []
    with run_of(Checkpoints(folder=tmp_path, when=1, memory=False), mesh={"shard": 1}) as run:
        parts, (model, optimizer) = parts_of(run), wrapped(run, SAME)()
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)

        def loop() -> None:
            for _ in run.epochs(1):
                for number, (x, y) in enumerate(loader, start=loader.index):
                    learned.append(parts.session.progress.rollback.needs_copies)
                    if number == 3:
                        change(model)
                    optimizer.zero_grad()
                    F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()

        run.retry(loop)
    assert learned == [*[""] * 4, *["weights change outside of optimizer.step()"] * 2]
