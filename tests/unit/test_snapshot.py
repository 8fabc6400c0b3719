"""Non-parameter state is restored exactly: a repeated step starts from the same state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints.format.state_tree import flatten, unflatten
from elastic.training.gradients.wrap import ElasticDDP
from elastic.training.state.job_state import JobState
from elastic.training.state.snapshot import NonParameterState


class Job:
    """A model with buffers, an optimizer, a scheduler and a scaler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.state = JobState(seed=0)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.state.modules["model"] = ElasticDDP(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=torch.tensor(0.1))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for name in ("optimizer", "scheduler", "scaler"):
            self.state.track(name, getattr(self, name))
        self.state.user["best"] = {"accuracy": [0.5]}
        self.non_parameters = NonParameterState(self.state)

    def train(self) -> None:
        loss = self.module(torch.randn(8, 4)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.progress.step += 1
        self.state.user["best"]["accuracy"].append(1.0)

    def facts(self) -> dict[str, Any]:
        return {
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "last": self.scheduler.last_epoch,
            "scale": self.scaler.get_scale(),
            "mean": self.module[1].running_mean.clone().tolist(),  # type: ignore[operator]
            "seen": int(self.module[1].num_batches_tracked),  # type: ignore[arg-type]
            "step": self.state.progress.step,
            "user": str(self.state.user),
        }


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    made.train()
    yield made


def test_all_non_parameter_state_is_restored(job: Job) -> None:
    before, taken = job.facts(), job.non_parameters.take()
    job.train()
    changed = job.facts()
    assert all(changed[name] != before[name] for name in before)
    job.non_parameters.restore(taken)
    assert job.facts() == before


def test_a_snapshot_can_be_restored_twice(job: Job) -> None:
    before, taken = job.facts(), job.non_parameters.take()
    for _ in range(2):
        job.train()
        job.non_parameters.restore(taken)
        assert job.facts() == before


def test_a_step_can_be_repeated_after_scaler_step(job: Job) -> None:
    """The scaler rejects a second step() of an optimizer before update()."""
    taken = job.non_parameters.take()
    job.scaler.scale(job.module(torch.randn(8, 4)).square().mean()).backward()
    job.scaler.step(job.optimizer)
    job.non_parameters.restore(taken)
    job.optimizer.zero_grad()
    before = [p.detach().clone() for p in job.module.parameters()]
    job.train()
    assert not all(map(torch.equal, before, job.module.parameters()))


def test_the_learning_rate_tensor_stays_the_same_object(job: Job) -> None:
    """Compiled optimizers have captured it."""
    rate, taken = job.optimizer.param_groups[0]["lr"], job.non_parameters.take()
    job.train()
    job.non_parameters.restore(taken)
    assert job.optimizer.param_groups[0]["lr"] is rate


def test_a_snapshot_is_serialized_as_json_and_tensors(job: Job) -> None:
    before, taken = job.facts(), job.non_parameters.take()
    node, tensors = flatten(taken)
    job.train()
    other = Job()
    other.train()
    other.train()
    other.non_parameters.restore(unflatten(node, lambda path, name: tensors[name]))
    assert other.facts() == before


def test_buffers_that_change_without_a_new_version_are_copied(job: Job) -> None:
    """As in batch norm."""
    job.non_parameters.take()
    job.train()
    before, taken = job.facts(), job.non_parameters.take()
    job.train()
    job.non_parameters.restore(taken)
    assert job.facts() == before


def test_buffers_that_are_none_are_skipped() -> None:
    state = JobState(seed=0)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    state.modules["model"] = ElasticDDP(norm)
    non_parameters = NonParameterState(state)
    assert non_parameters.take()["buffers"] == {"model": {}}
    norm.register_buffer("running_mean", torch.ones(4))
    assert torch.equal(non_parameters.take()["buffers"]["model"]["running_mean"], torch.ones(4))
    norm.running_mean = None
    non_parameters.restore(non_parameters.take())
    assert norm.running_mean is None


def test_buffers_that_a_step_replaces_or_resizes_are_restored() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part: Any = nn.Module()
            self.part.register_buffer("mean", torch.zeros(2))
            self.part.register_buffer("seen", torch.zeros(0))
            self.register_buffer("nothing", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.part.mean = self.part.mean + x
            self.part.seen.resize_(len(self.part.seen) + 1)[-1] = x[0]
            return x

    state = JobState(seed=0)
    state.modules["model"] = wrapped = ElasticDDP(Late())
    non_parameters = NonParameterState(state)
    for _ in range(3):
        wrapped(torch.ones(2))
        taken = non_parameters.take()
    wrapped(torch.ones(2))
    wrapped.module.part.register_buffer("late", torch.ones(1))
    non_parameters.restore(taken)
    found = {name: buffer.tolist() for name, buffer in wrapped.module.named_buffers()}
    assert found == {"part.mean": [3.0, 3.0], "part.seen": [1.0, 1.0, 1.0], "part.late": [1.0]}


def test_large_tracked_objects_are_omitted() -> None:
    """An average of the weights changes only at commits."""

    class Average:
        def __init__(self) -> None:
            self.weights = torch.zeros(1 << 20)

        def state_dict(self) -> dict[str, Any]:
            return {"weights": self.weights}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("not to be loaded")

    state = JobState(seed=0)
    state.track("ema", Average())
    non_parameters = NonParameterState(state)
    assert non_parameters.take()["tracked"] == {}
