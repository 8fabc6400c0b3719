"""``run.track(…, local=True)``: state that is rolled back with a step, and never another rank's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.run_kit import Job, job, parts_of, process, undo_step
from torch import nn

from elastic.errors import ConfigError, TrainingError
from elastic.train.local import LocalState
from elastic.train.run import Run


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []
        self.sum = torch.zeros(())

    def update(self, value: float) -> None:
        self.values.append(value)
        self.sum += value

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.sum = state["values"], state["sum"]


class Metric(nn.Module):
    """As those of torchmetrics: its state is in attributes that its state_dict lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.seen = torch.zeros(()), [torch.zeros(1)]
        self._update_count, self._computed = 0, None
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(()), persistent=False)

    @property
    def metric_state(self) -> dict[str, Any]:
        return {"total": self.total, "seen": self.seen}

    def update(self, value: float) -> None:
        self.total = self.total + value
        self.seen.append(torch.full((1,), value))
        self.scale.mul_(2)
        self._update_count += 1


class Collection(nn.ModuleDict):
    """As a MetricCollection: the state of each metric by its name."""

    @property
    def metric_state(self) -> dict[str, Any]:
        return {name: metric.metric_state for name, metric in self.items()}


def run_steps(run: Run, one: Job, meter: Meter, steps: int) -> None:
    """Commit so many steps; the next one has begun."""
    run.untracked("done")
    done = 0
    for _ in run.epochs(3):
        for x, y in one.loader:
            if done == steps:
                return
            one.update(x, y)
            meter.update(float(done))
            done += 1


def test_an_interrupted_step_is_undone(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        one, meter, first = job(run), Meter(), Metric()
        metrics = Collection({"one": first, "two": Metric()})
        run.track(meter=meter, metrics=metrics, local=True)
        values, total = meter.values, meter.sum
        first.update(5.0)
        run_steps(run, one, meter, 4)
        meter.update(99.0)
        first.update(7.0)
        undo_step(run)
        assert meter.values == [0, 1, 2, 3] and meter.sum == 6
        assert meter.values is values and meter.sum is total
        assert (float(first.total), float(first.scale)) == (5.0, 2.0)
        assert (len(first.seen), first._update_count) == (2, 1)


def test_another_ranks_state_leaves_it_as_it_is(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        one, meter = job(run), Meter()
        run.track(meter=meter, local=True)
        run_steps(run, one, meter, 4)
        rollback = parts_of(run).session.progress.rollback
        theirs = copy.deepcopy(rollback.snapshot)
        assert "meter" not in repr(theirs)
        theirs["progress"]["step"] += 1
        undo_step(run)
        rollback.adopt(theirs)
        assert parts_of(run).session.job.progress.step == 5
        assert meter.values == [0, 1, 2, 3]


def test_it_is_in_no_checkpoint(tmp_path: Path) -> None:
    with process(tmp_path, every_steps=1) as run:
        one, meter = job(run), Meter()
        run.track(meter=meter, local=True)
        run_steps(run, one, meter, 4)
        undo_step(run)
    with process(tmp_path) as run:
        one, meter = job(run), Meter()
        run.track(meter=meter, local=True)
        for _ in run.epochs(3):
            assert parts_of(run).session.job.progress.step == 4
            assert meter.values == []
            break


@pytest.mark.parametrize(
    ("theirs", "values"),
    [(10, [9.0]), (9, [9.0]), (8, [6.0]), (6, [6.0]), (5, [4.0]), (4, [4.0]), (3, [1.0])],
)
def test_the_own_boundary_is_chosen_by_that_of_the_job(theirs: int, values: list[float]) -> None:
    """Of step 4, the weights are copied; that of step 6 is saved."""
    meter = Meter()
    local = LocalState({"meter": meter})
    for step in (1, 4, 6, 9):
        meter.values = [float(step)]
        local.take((step, 0, 0))
        if step == 4:
            local.keep()
        if step == 6:
            local.save((6, 0, 0))
    meter.values = [9.0, 10.0]
    local.adopt((theirs, 0, 0))
    assert meter.values == values


def test_objects_that_replace_others_inherit_their_state(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        one, meter = job(run), Meter()
        run.track(meter=meter, local=True)
        run_steps(run, one, meter, 2)
        tree = parts_of(run).session.job.own_tree()
        meter.update(99.0)
        parts_of(run).session.job.apply(tree)
        assert meter.values == [0, 1]


def test_states_are_gathered(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        one, meter = job(run), Meter()
        run.track(meter=meter, local=True)
        run_steps(run, one, meter, 2)
        (own,) = run.gather_states("meter")
        assert own["values"] == [0, 1] and own["values"] is not meter.values
        assert own["sum"] == 1 and own["sum"] is not meter.sum
        with pytest.raises(TrainingError, match="no local object of this name"):
            run.gather_states("optimizer")


def test_what_must_be_the_same_on_all_ranks_is_refused() -> None:
    with process() as run:
        one, meter = job(run), Meter()
        scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 1)
        for same in (one.optimizer, scheduler, torch.amp.GradScaler("cpu")):
            with pytest.raises(TrainingError, match="must be the same on all ranks"):
                run.track(other=same, local=True)
        with pytest.raises(ConfigError, match="local="):
            run.track(local=meter, other=meter)  # type: ignore[arg-type]
        run.track(meter=meter, local=True)
        with pytest.raises(TrainingError, match="used by another object"):
            run.track(meter=Meter(), local=True)
        with pytest.raises(TrainingError, match="used by another object"):
            run.track(meter=meter)


def test_finished_work_between_steps_keeps_its_changes(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        job(run)
        meter = Meter()
        run.track(meter=meter, local=True)

        def train() -> None:
            run.once("evaluate", lambda: meter.update(2.0))
            meter.update(99.0)
            undo_step(run)
            assert meter.values == [2.0]

        run.retry(train)
