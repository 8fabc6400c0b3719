"""Tracked objects and data continue on the device on which the script created them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.train import loader, sampler
from elastic.train.copies import placed_like
from elastic.train.loader import SeededBatch
from elastic.train.rollback import BoundaryState
from elastic.train.sampler import preserved_generators
from elastic.train.state import JobState


class Average:
    """Keeps the tensors that it loads, as averages of weights do."""

    def __init__(self, device: str) -> None:
        self.shadow = {"weight": torch.zeros(2, device=device)}
        self.history: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "history": self.history, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.history = state["shadow"], state["history"]


def test_loaded_tensors_are_on_the_device_of_those_they_replace() -> None:
    job, average = JobState(seed=0), Average("meta")
    job.tracked["average"] = average  # not tracked: meta tensors have nothing to save
    saved = {"shadow": {"weight": torch.ones(2)}, "history": [torch.ones(1)], "count": 4}
    job.apply({"model": {}, "tracked": {"average": saved}, "state": {}, "progress": {},
               "loaders": {}})  # fmt: skip
    assert average.shadow["weight"].device.type == "meta"
    assert average.history[0].device.type == "cpu"  # nothing says where


def test_placement_follows_the_structure() -> None:
    meta, cpu = torch.zeros(1, device="meta"), torch.zeros(1)
    value = {"a": [cpu, cpu], "b": (cpu, 1), "c": cpu, "d": "text"}
    placed = placed_like(value, {"a": [meta], "b": (meta, meta), "c": {"x": meta}})
    assert [t.device.type for t in placed["a"]] == ["meta", "cpu"]
    assert (placed["b"][0].device.type, placed["b"][1]) == ("meta", 1)
    assert (placed["c"].device.type, placed["d"]) == ("cpu", "text")


def test_data_drawn_on_a_gpu_depends_on_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu = torch.Generator()  # stands for the GPU's
    for module in (loader, sampler):
        monkeypatch.setattr(
            module, "generators_of_torch", lambda: [torch.default_generator, of_gpu]
        )
    before = of_gpu.get_state()
    with preserved_generators():
        drawn = [torch.rand(1, generator=of_gpu) for _ in SeededBatch([3, 4, 3], 0, 0)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.equal(of_gpu.get_state(), before)


def test_a_snapshot_of_another_rank_is_restored_on_the_device_of_the_object() -> None:
    job, average = JobState(seed=0), Average("meta")
    job.tracked["average"] = average
    boundary = BoundaryState(job)
    taken = boundary.take()
    taken["tracked"]["average"]["state"]["shadow"]["weight"] = arrived = torch.ones(2)
    boundary.restore(taken)
    assert average.shadow["weight"].device.type == "meta"
    assert arrived.device.type == "cpu"
