"""States that differ from those of a new process: what is loaded, and how the rest is refused."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError, TrainingError
from elastic.train.ddp import ElasticDDP
from elastic.train.state import JobState


class Observer(nn.Module):
    """As torch's per-channel observers: empty at first."""

    least: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.zeros(0))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if prefix + "least" in state:
            self.least.resize_(state[prefix + "least"].shape)
        super()._load_from_state_dict(state, prefix, *args)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.observer = nn.BatchNorm1d(3), Observer()


def job_of(module: nn.Module) -> JobState:
    job = JobState(seed=0)
    job.modules["model"] = ElasticDDP(module)
    return job


def changed(module: nn.Module, **buffers: torch.Tensor) -> dict[str, Any]:
    tree = copy.deepcopy(job_of(module).tree())
    tree["model"]["model"] |= {name.replace("__", "."): value for name, value in buffers.items()}
    return tree


@pytest.mark.parametrize(("module", "name"), [(Net(), "observer__least"), (Observer(), "least")])
def test_a_buffer_that_its_module_resizes_is_loaded(module: nn.Module, name: str) -> None:
    job = job_of(module)
    tree = changed(module, **{name: torch.ones(4)})
    job.check(tree, "the state")
    assert module.get_buffer(name.replace("__", ".")).shape == (0,), "the check changes nothing"
    job.apply(tree)
    assert module.get_buffer(name.replace("__", ".")).equal(torch.ones(4))


def test_differences_are_listed_in_the_order_of_the_model() -> None:
    """Repeatedly: the leader compares the texts of failures."""
    names = [f"norm__{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    tree = changed(Net(), **{name: torch.ones(4) for name in names})
    with pytest.raises(TrainingError) as refused:
        job_of(Net()).check(tree, "the state")
    listed = [line.split()[1] for line in str(refused.value).splitlines() if " has shape " in line]
    assert listed == [name.replace("__", ".") for name in names]


def test_of_several_loaders_with_other_data_the_first_name_is_refused() -> None:
    job, names = job_of(Net()), ("validation", "train", "calibration", "images", "texts")
    tree = job.tree()
    for name in names:
        job.loaders[name] = Mock(load_state_dict=Mock(side_effect=ConfigError(name)))
        tree["loaders"][name] = {}
    with pytest.raises(ConfigError, match="calibration"):
        job.check(tree, "the state")


def test_another_buffer_of_another_shape_is_refused() -> None:
    tree = changed(Net(), norm__running_mean=torch.ones(4))
    with pytest.raises(TrainingError, match=r"norm\.running_mean has shape \(4,\), here \(3,\)"):
        job_of(Net()).check(tree, "the state")
