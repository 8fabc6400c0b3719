"""An interrupted step is undone exactly, or the rank knows that its state is torn."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from run_kit import dataset, job, network, parts_of, process, steps_of_job
from torch import nn

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.training.gradients.wrap import ElasticDDP
from elastic.training.rebuilding.containers import inner_optimizers
from elastic.training.state.copies import WeightCopies
from elastic.training.state.job_state import JobState
from elastic.training.state.optimizers import OptimizerWatch
from elastic.training.state.rollback import Rollback
from elastic.training.step import Step


class Script:
    """The objects of one rank that its rollback tracks, without a world."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.optimizer_watch = OptimizerWatch(lambda: self.step)
        self.job = JobState(seed=0)
        self.model = ElasticDDP(network(hidden=200))
        self.job.modules["model"] = self.model
        self.optimizer_watch.watch(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.job.track("optimizer", self.optimizer)
        self.optimizer_watch.allow("optimizer", self.optimizer)
        self.average = copy.deepcopy(self.model.module)
        for _ in range(3):
            self.average.append(nn.Linear(200, 200))  # too large to be copied in every step
        self.job.track("average", self.average)
        self.rollback = self.optimizer_watch.rollback = Rollback(
            self.job, self.optimizer_watch.tracked
        )

    def update(self) -> None:
        x, y = dataset()[:8]
        self.optimizer.zero_grad()
        F.mse_loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def commit(self) -> None:
        self.rollback.committed()
        self.rollback.take()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    made.rollback.take()
    made.update()
    made.commit()  # ends the first step, in which everything is copied
    yield made
    made.optimizer_watch.close()


def clip(script: Script) -> None:
    with torch.no_grad():
        for p in script.model.parameters():
            p.clamp_(-0.1, 0.1)


def test_an_optimizer_update_is_kept_and_masked(script: Script) -> None:
    script.update()
    after = script.weights()
    done = script.rollback.restore(is_torn=False)
    assert (done.is_torn, done.has_updates) == (False, True)
    assert torch.equal(script.weights(), after)


def test_a_step_with_several_updates_is_undone(script: Script) -> None:
    """As in PPO: its rollout has been played with the weights before the first update."""
    script.step = Step.past(1, 0, 1, 1)
    script.update()
    script.update()
    script.commit()
    before = script.weights()
    script.step = Step.past(2, 0, 2, 1)
    script.update()
    done = script.rollback.restore(is_torn=False)
    assert (done.is_torn, done.has_updates) == (False, False)
    assert torch.equal(script.weights(), before)


def test_a_change_outside_the_optimizer_is_torn_once_and_then_undone(
    script: Script,
) -> None:
    script.update()
    clip(script)
    assert script.rollback.restore(is_torn=False).is_torn
    script.commit()  # as after receiving the state of a peer
    script.update()
    clip(script)
    script.commit()
    before = script.weights()
    momenta = copy.deepcopy(script.optimizer.state_dict()["state"])
    script.update()
    clip(script)
    done = script.rollback.restore(is_torn=True)
    assert (done.is_torn, done.has_updates) == (False, False)
    assert torch.equal(script.weights(), before)
    assert repr(script.optimizer.state_dict()["state"]) == repr(momenta)


def test_a_change_between_optimizer_steps_is_detected(script: Script) -> None:
    clip(script)
    script.update()
    assert script.rollback.restore(is_torn=False).is_torn


def test_a_changed_large_object_is_torn_once_and_then_undone(
    script: Script,
) -> None:
    last = script.average[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.add_(1)
    assert script.rollback.restore(is_torn=False).is_torn
    script.commit()
    before = last.weight.detach().clone()
    with torch.no_grad():
        last.weight.add_(1)
    assert not script.rollback.restore(is_torn=False).is_torn
    assert torch.equal(last.weight, before)


def test_the_first_step_is_always_undone() -> None:
    made = Script()
    try:
        made.rollback.take()
        before = made.weights()
        made.update()
        clip(made)
        made.average.requires_grad_(False)[-1].weight.zero_()
        assert not made.rollback.restore(is_torn=True).is_torn
        assert torch.equal(made.weights(), before)
        assert made.optimizer.state_dict()["state"] == {}
        assert made.average[-1].weight.abs().sum() > 0
    finally:
        made.optimizer_watch.close()


def test_joining_ranks_adopt_the_known_habits_of_the_script(script: Script) -> None:
    script.update()
    clip(script)
    script.commit()
    assert script.rollback.habits["weights"] == "weights change outside of optimizer.step()"
    new = Script()
    try:
        new.rollback.adopt(script.rollback.habits, script.rollback.snapshot)
        new.rollback.take()
        before = new.weights()
        clip(new)
        assert not new.rollback.restore(is_torn=False).is_torn
        assert torch.equal(new.weights(), before)
    finally:
        new.optimizer_watch.close()


def test_without_memory_for_copies_an_interrupted_step_is_torn(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(WeightCopies, "take", full)
    script.update()
    clip(script)
    with caplog.at_level(logging.WARNING, "elastic"):
        monkeypatch.setattr(get_logger(), "propagate", True)
        script.commit()
    assert "not enough memory for a copy of the weights" in caplog.text
    script.update()
    clip(script)
    assert script.rollback.restore(is_torn=False).is_torn


def test_copies_restore_added_removed_and_replaced_state() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    kept = torch.full((3,), 2.0)
    optimizer.state[parameter] = {"kept": kept, "removed": torch.ones(2), "count": 4}
    copies = WeightCopies()
    copies.take([parameter], [optimizer])
    state = optimizer.state[parameter]
    kept.add_(1)
    del state["removed"]
    state["count"] = 5
    state["made"] = torch.zeros(1)
    copies.restore([parameter], [optimizer])
    assert set(state) == {"kept", "removed", "count"}
    assert state["kept"] is kept and kept.tolist() == [2.0] * 3
    assert state["removed"].tolist() == [1.0, 1.0] and state["count"] == 4


class Wrapping(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups


def test_an_optimizer_inside_a_tracked_one_is_saved(tmp_path: Path) -> None:
    inner = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    assert inner_optimizers(Wrapping(inner)) == {"inner": inner}
    with process(tmp_path) as run:
        run.track(optimizer=Wrapping(inner))
        assert set(parts_of(run).job.tracked) == {"optimizer", "optimizer.inner"}
        job_state = parts_of(run).job
        job_state.apply_non_parameters(copy.deepcopy(job_state.tree()))
        outer = job_state.tracked["optimizer"]
        assert isinstance(outer, Wrapping)
        assert outer.param_groups is inner.param_groups, "a change of one's rate is the other's"


def test_callbacks_registered_in_a_retried_function_run_once() -> None:
    with process() as run:
        script = job(run)
        calls: list[int] = []
        run.after_step(lambda step: calls.append(-1))

        def train() -> None:
            run.after_step(lambda step: calls.append(step.number))
            script.train(1)

        attempts = parts_of(run).attempts
        attempts.begin()
        run.after_step(lambda step: calls.append(99))  # registered by an interrupted call
        attempts.begin(is_again=True)
        train()
        steps = steps_of_job(run)
        assert sorted(calls) == [-1] * steps + list(range(steps))


def test_a_commit_with_unused_gradients_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(tmp_path) as run:
        script = job(run)
        monkeypatch.setattr(get_logger(), "propagate", True)
        with caplog.at_level(logging.WARNING, "elastic"):
            for _ in range(2):
                run.begin()
                x, y = dataset()[:8]
                F.mse_loss(script.model(x), y).backward()  # type: ignore[no-untyped-call]
                run.commit()
        warnings = [r for r in caplog.records if "has unapplied gradients" in r.getMessage()]
        assert len({id(record) for record in warnings}) == 1
        script.optimizer.zero_grad()


def test_accumulated_steps_are_committed_with_the_optimizer_step(tmp_path: Path) -> None:
    seen = []
    with process(tmp_path, every_steps=3) as run:
        script = job(run)
        run.after_step(lambda step: seen.append(step.number))
        for _ in run.epochs(1):
            for i, (x, y) in enumerate(script.loader):
                (F.mse_loss(script.model(x), y) / 4).backward()  # type: ignore[no-untyped-call]
                if (i + 1) % 4 == 0:
                    script.optimizer.step()
                    script.optimizer.zero_grad()
        steps = steps_of_job(run)
    assert seen == [i for i in range(steps) if (i + 1) % 4 == 0 or i == steps - 1]
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert {int(name.split(".")[0][5:]) for name in names} <= {4, 8, 12, steps}


def test_a_second_begin_without_a_commit_is_rejected(tmp_path: Path) -> None:
    with process(clean=False) as run:
        job(run)
        run.begin()
        with pytest.raises(
            TrainingError, match=r"run\.begin\(\) was called while step 0 is not committed"
        ):
            run.begin()


class Interrupted(RuntimeError):
    """Stands for a fault of the world."""


def test_a_fault_in_a_hook_before_the_update_tears_nothing(script: Script) -> None:
    """As in mixtures of experts: the hook sums the loads of the experts over all ranks. If a peer
    dies there, all other ranks are in the hook, and none of them has updated anything."""

    def sum_over_ranks(*_: object) -> None:
        raise Interrupted

    script.optimizer.register_step_pre_hook(sum_over_ranks)
    with pytest.raises(Interrupted):
        script.update()
    assert not script.optimizer_watch.is_torn


def test_a_fault_in_a_hook_that_has_changed_the_optimizer_tears_it(script: Script) -> None:
    def change(*_: object) -> None:
        for state in script.optimizer.state.values():
            state["exp_avg"].zero_()
        raise Interrupted

    script.optimizer.register_step_pre_hook(change)
    with pytest.raises(Interrupted):
        script.update()
    assert script.optimizer_watch.is_torn


def test_a_fault_within_an_update_tears_the_weights(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hooks, it is not counted how much has changed."""

    def fail(*_: object, **__: object) -> None:
        raise Interrupted

    monkeypatch.setattr(sys.modules[torch.optim.Adam.__module__], "adam", fail)
    with pytest.raises(Interrupted):
        script.update()
    assert script.optimizer_watch.is_torn
