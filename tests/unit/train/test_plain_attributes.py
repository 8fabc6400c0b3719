"""Plain attributes of modules and data as state."""

from __future__ import annotations

import functools
import io
import zipfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from elastic.train.attributes import PlainAttributes, attributes_of_data, attributes_of_module
from elastic.train.ddp import ElasticDDP
from elastic.train.rollback import Rollback
from elastic.train.state import JobState


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.temperature = 2.0
        self.calls = 0
        self.cache: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.body(inputs)
        return outputs / self.temperature


class Images(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.mosaic = True
        self.transforms = [nn.Dropout(0.5)]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2)


def of(module: nn.Module) -> PlainAttributes:
    return attributes_of_module(module, None)


def test_only_what_training_has_changed_is_state() -> None:
    module: Any = Annealed()
    attributes = of(module)
    assert attributes.take() == {}
    module.temperature, module.body[1].p = 1.0, 0.1
    module.body[1].eval()
    assert attributes.take() == {
        "": {"temperature": 1.0},
        "body.1": {"p": 0.1, "training": False},
    }
    module.temperature = 2.0  # as in the beginning: still known to change
    assert attributes.take()[""] == {"temperature": 2.0}


def test_what_the_script_sets_before_its_first_loop_is_its_own() -> None:
    module: Any = Annealed()
    attributes = of(module)
    module.device = "cuda:3"
    attributes.accept()
    assert attributes.take() == {}
    attributes.restore({})
    assert module.device == "cuda:3"


def test_another_rank_gets_what_training_has_changed() -> None:
    source: Any = Annealed()
    target: Any = Annealed()
    from_source, to_target = of(source), of(target)
    source.calls, source.phase = 7, "fine"
    source.body.eval()
    to_target.restore(from_source.take())
    assert (target.calls, target.phase, target.body[1].training) == (7, "fine", False)
    assert to_target.take() == from_source.take()  # it may be the source for others


def test_an_undone_step_leaves_no_attribute() -> None:
    module: Any = Annealed()
    attributes = of(module)
    module.calls = 3
    boundary = attributes.take()
    module.calls, module.temperature, module.new = 4, 0.5, True
    module.cache = torch.zeros(2)
    attributes.restore(boundary)
    assert (module.calls, module.temperature, module.cache) == (3, 2.0, None)
    assert not hasattr(module, "new")
    module.calls = 4
    assert attributes.take() == {"": {"calls": 4}}


def test_an_attribute_that_becomes_a_tensor_is_left_alone() -> None:
    module: Any = Annealed()
    attributes = of(module)
    module.cache = torch.ones(2)
    assert attributes.take() == {}
    attributes.restore({})
    assert module.cache is not None


def test_an_interrupted_evaluation_does_not_leave_the_model_in_eval_mode() -> None:
    model = ElasticDDP(Annealed())
    attributes = attributes_of_module(model.module, model)
    boundary = attributes.take()
    model.eval()
    attributes.restore(boundary)
    assert all(module.training for module in model.modules())


def test_modules_that_were_frozen_before_stay_in_eval_mode() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    attributes = of(network)
    boundary = attributes.take()
    network.train()
    attributes.restore(boundary)
    assert [module.training for module in network] == [True, False]


def test_datasets_and_their_transforms_have_state() -> None:
    data, other = Images(), Images()
    attributes = attributes_of_data(data, None)
    data.mosaic, data.transforms[0].p = False, 0.0
    taken = attributes.take()
    assert taken == {"dataset": {"mosaic": False}, "dataset.transforms[0]": {"p": 0.0}}
    attributes_of_data(other, None).restore(taken)
    assert (other.mosaic, other.transforms[0].p) == (False, 0.0)


def test_a_collate_function_may_be_a_method_or_have_attributes() -> None:
    def collate(items: list[Any]) -> list[Any]:
        return items

    class Padding:
        length = 4

        def collate(self, items: list[Any]) -> list[Any]:
            return items

    padding = Padding()
    of_function = attributes_of_data(Images(), functools.partial(collate))
    of_method = attributes_of_data(Images(), padding.collate)
    collate.calls = 1  # type: ignore[attr-defined]
    padding.length = 8
    assert of_function.take() == {"collate_fn.func": {"calls": 1}}
    assert of_method.take() == {"collate_fn.__self__": {"length": 8}}


def test_containers_of_samples_are_not_searched() -> None:
    class Samples(Images):
        def __init__(self) -> None:
            super().__init__()
            self.samples = [Images() for _ in range(1000)]

    data = Samples()
    attributes = attributes_of_data(data, None)
    data.samples[0].mosaic = False
    assert attributes.take() == {}


def job_of(network: nn.Module) -> JobState:
    job = JobState(seed=0)
    job.modules["model"] = ElasticDDP(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    job.track("optimizer", optimizer)
    return job


def test_attributes_belong_to_a_boundary_and_to_the_saved_state() -> None:
    job = job_of(Annealed())
    module: Any = job.modules["model"].module
    rollback = Rollback(job, {"optimizer": job.tracked["optimizer"]})  # type: ignore[dict-item]
    rollback.take()
    module.calls += 1
    rollback.take()
    module.calls, module.body[1].p = 9, 0.9
    assert rollback.restore()
    assert (module.calls, module.body[1].p) == (1, 0.5)

    other = job_of(Annealed())
    other.check(job.tree(), "the state")
    other.apply(job.tree())
    restored: Any = other.modules["model"].module
    assert restored.calls == 1


def test_a_tracked_module_has_attributes_too() -> None:
    teacher = nn.Linear(2, 2).eval()
    job = job_of(nn.Linear(2, 2))
    job.track("teacher", teacher)
    rollback = Rollback(job, {"optimizer": job.tracked["optimizer"]})  # type: ignore[dict-item]
    rollback.take()
    teacher.train()
    assert rollback.restore()
    assert not teacher.training


def test_objects_of_libraries_in_a_dataset_keep_their_attributes() -> None:
    """They may count references, as an archive that a dataset reads does."""
    data: Any = Images()
    data.archive = zipfile.ZipFile(io.BytesIO(), "w")
    data.archive.writestr("image", b"")
    attributes = attributes_of_data(data, None)
    with data.archive.open("image"):
        attributes.restore({})
        assert data.archive._fileRefCnt == 2
