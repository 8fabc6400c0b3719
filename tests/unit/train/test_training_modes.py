"""The training mode of modules when the training function is called again."""

from __future__ import annotations

import torch
from torch import nn

from elastic.train.ddp import ElasticDDP
from elastic.train.run import TrainingModes
from elastic.train.state import JobState


def job_of(network: nn.Module) -> JobState:
    job = JobState(seed=0)
    job.modules["model"] = ElasticDDP(network)
    return job


def test_an_interrupted_evaluation_does_not_leave_the_model_in_eval_mode() -> None:
    job = job_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    modes = TrainingModes(job)
    modes.begin_attempt(is_again=False)
    model = job.modules["model"]
    assert isinstance(model, nn.Module)
    model.eval()
    modes.begin_attempt(is_again=True)
    assert all(module.training for module in model.modules())


def test_modules_that_were_frozen_before_stay_in_eval_mode() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    job = job_of(network)
    modes = TrainingModes(job)
    modes.begin_attempt(is_again=False)
    network.train()
    modes.begin_attempt(is_again=True)
    assert [module.training for module in network] == [True, False]


def test_tracked_modules_are_restored_too() -> None:
    teacher = nn.Linear(2, 2).eval()
    job = job_of(nn.Linear(2, 2))
    job.track("teacher", teacher)
    job.track("optimizer", torch.optim.SGD(teacher.parameters(), lr=0.1))
    modes = TrainingModes(job)
    modes.begin_attempt(is_again=False)
    teacher.train()
    modes.begin_attempt(is_again=True)
    assert not teacher.training


def test_each_first_call_records_the_modes_again() -> None:
    """The second of several run.retry calls may train in another mode."""
    network = nn.Linear(2, 2)
    modes = TrainingModes(job_of(network))
    modes.begin_attempt(is_again=False)
    network.eval()
    modes.begin_attempt(is_again=False)
    modes.begin_attempt(is_again=True)
    assert not network.training
