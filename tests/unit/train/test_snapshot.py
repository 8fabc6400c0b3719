"""The state of a boundary is restored exactly: a repeated step starts from the same state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints.tree import flatten, unflatten
from elastic.train.ddp import ElasticDDP
from elastic.train.rollback import BoundaryState
from elastic.train.state import JobState


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
        self.boundary = BoundaryState(self.state)

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
    before, taken = job.facts(), job.boundary.take()
    job.train()
    changed = job.facts()
    assert all(changed[name] != before[name] for name in before)
    job.boundary.restore(taken)
    assert job.facts() == before


def test_a_snapshot_can_be_restored_twice(job: Job) -> None:
    before, taken = job.facts(), job.boundary.take()
    for _ in range(2):
        job.train()
        job.boundary.restore(taken)
        assert job.facts() == before


def test_a_step_can_be_repeated_after_scaler_step(job: Job) -> None:
    """The scaler rejects a second step() of an optimizer before update()."""
    taken = job.boundary.take()
    job.scaler.scale(job.module(torch.randn(8, 4)).square().mean()).backward()
    job.scaler.step(job.optimizer)
    job.boundary.restore(taken)
    job.optimizer.zero_grad()
    before = [p.detach().clone() for p in job.module.parameters()]
    job.train()
    assert not all(map(torch.equal, before, job.module.parameters()))


def test_the_learning_rate_tensor_stays_the_same_object(job: Job) -> None:
    """Compiled optimizers have captured it."""
    rate, taken = job.optimizer.param_groups[0]["lr"], job.boundary.take()
    job.train()
    job.boundary.restore(taken)
    assert job.optimizer.param_groups[0]["lr"] is rate


def test_a_snapshot_is_serialized_as_json_and_tensors(job: Job) -> None:
    before, taken = job.facts(), job.boundary.take()
    node, tensors = flatten(taken)
    job.train()
    other = Job()
    other.train()
    other.train()
    other.boundary.restore(unflatten(node, lambda path, name: tensors[name]))
    assert other.facts() == before


def test_buffers_that_change_without_a_new_version_are_copied(job: Job) -> None:
    """As in batch norm."""
    job.boundary.take()
    job.train()
    before, taken = job.facts(), job.boundary.take()
    job.train()
    job.boundary.restore(taken)
    assert job.facts() == before


def test_buffers_that_are_none_are_skipped() -> None:
    state = JobState(seed=0)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    state.modules["model"] = ElasticDDP(norm)
    boundary = BoundaryState(state)
    assert boundary.take()["buffers"] == {"model": {}}
    norm.register_buffer("running_mean", torch.ones(4))
    assert torch.equal(boundary.take()["buffers"]["model"]["running_mean"], torch.ones(4))
    norm.running_mean = None
    boundary.restore(boundary.take())
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
    boundary = BoundaryState(state)
    for _ in range(3):
        wrapped(torch.ones(2))
        taken = boundary.take()
    wrapped(torch.ones(2))
    wrapped.module.part.register_buffer("late", torch.ones(1))
    boundary.restore(taken)
    found = {name: buffer.tolist() for name, buffer in wrapped.module.named_buffers()}
    assert found == {"part.mean": [3.0, 3.0], "part.seen": [1.0, 1.0, 1.0], "part.late": [1.0]}


class Tracked:
    """An object of the script, with a state_dict."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def boundary_of(**tracked: Any) -> BoundaryState:
    state = JobState(seed=0)
    for name, item in tracked.items():
        state.track(name, item)
    return BoundaryState(state)


def test_the_tensors_of_large_objects_are_not_copied() -> None:
    average = Tracked(weights=torch.zeros(1 << 20), count=1)
    boundary = boundary_of(ema=average)
    taken = boundary.take()
    assert "state" in taken["tracked"]["ema"]
    assert list(boundary.large()) == [("ema", "weights")]
    weights = average.values["weights"].fill_(2)
    average.values["count"] = 2
    boundary.restore(taken)
    assert average.values["weights"] is weights and float(weights[0]) == 2
    assert average.values["count"] == 1


def test_a_large_tensor_that_the_step_has_removed_is_loaded_from_its_copy() -> None:
    average = Tracked(parts=[torch.zeros(1 << 20), None])
    boundary = boundary_of(ema=average)
    taken, copy = boundary.take(), torch.ones(1 << 20)
    average.values["parts"] = None
    boundary.restore(taken, lambda path, own: copy if path == ("ema", "parts", 0) else own)
    assert average.values["parts"][0] is copy and average.values["parts"][1] is None


class Noam(Tracked):
    """A wrapper of an optimizer with a count of its own, as in The Annotated Transformer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizer, self.steps = optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])


def test_an_object_that_holds_an_optimizer_is_restored_with_its_own_values() -> None:
    parameter = nn.Parameter(torch.ones(2))
    noam = Noam(torch.optim.SGD([parameter], lr=0.1))
    boundary = boundary_of(noam=noam)
    groups, group = noam.optimizer.param_groups, noam.optimizer.param_groups[0]
    taken = boundary.take()
    noam.steps, group["lr"] = 1, 0.2
    boundary.restore(taken)
    assert (noam.steps, group["lr"]) == (0, 0.1)
    assert noam.optimizer.param_groups is groups and groups[0] is group


class Counting(torch.optim.SGD):
    """An optimizer whose state_dict has a value of its own."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})


def test_an_optimizer_is_restored_with_the_values_of_its_class_and_groups() -> None:
    optimizer = Counting([nn.Parameter(torch.ones(2))], lr=0.1)
    group = optimizer.param_groups[0]
    group["history"] = [1]
    boundary = boundary_of(optimizer=optimizer)
    taken = boundary.take()
    optimizer.count = 1
    group["history"].append(2)
    group["new"] = 3
    boundary.restore(taken)
    assert optimizer.count == 0 and optimizer.param_groups[0] is group
    assert group["history"] == [1] and "new" not in group


class Transient(nn.Module):
    """A module with a buffer outside of its state_dict, and with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


@pytest.mark.parametrize("is_tracked", [True, False], ids=["tracked", "wrapped"])
def test_transient_buffers_and_extra_state_are_restored(is_tracked: bool) -> None:
    module, state = Transient(), JobState(seed=0)
    if is_tracked:
        state.track("module", module)
    else:
        state.modules["model"] = ElasticDDP(module)
    boundary = BoundaryState(state)
    taken = boundary.take()
    module.calls = 1
    module.get_buffer("seen").add_(1)
    boundary.restore(taken)
    assert module.calls == 0 and module.get_buffer("seen").tolist() == [0, 0]
