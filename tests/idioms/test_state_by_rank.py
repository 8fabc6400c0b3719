"""State that differs between ranks, and what a joining node receives and calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from idiom_runs import IdiomRuns
from test_worst_places import BY_ITSELF, HEAD, STEP, TAIL, TRAINED

WARNING = "the tracked 'bank' differs between ranks"

# Each rank writes at its own samples: a memory bank without a gather.
BANK = """
bank = nn.Module()
bank.register_buffer("features", torch.zeros(96, 1))
run.track(bank=bank)

def train():
    for epoch in run.epochs(1):
        for step in run.steps(loader):
            ((inputs, targets),) = step
            STEP
            indices, features = torch.tensor(step.indices), model(inputs).detach()
            GATHER
            bank.features[indices] = features
"""
GATHER = """
            parts = [None] * run.world.size
            dist.all_gather_object(parts, (indices, features))
            indices, features = (torch.cat(part) for part in zip(*parts))
"""


@pytest.mark.parametrize(("gather", "warns"), [("", True), (GATHER, False)])
def test_a_tracked_object_that_differs_between_ranks_causes_a_warning(
    runs: IdiomRuns, tmp_path: Path, gather: str, warns: bool
) -> None:
    script = tmp_path / "script.py"
    body = BANK.replace("STEP", STEP).replace("GATHER", gather.strip())
    script.write_text(HEAD + TRAINED + body + TAIL)
    outcome = runs.world.run(script, tmp_path / "job", size=3)
    outcome.assert_success(workers=3)
    assert outcome.describe().count(WARNING) == (3 if warns else 0), outcome.describe()


AVERAGE_OF_SHARDS = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
import elastic


class Average:
    def __init__(self, model):
        self.values = {name: p.SHARD.clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.SHARD, 0.1)

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = dict(state)


run = elastic.join(mesh={"shard": 2})
torch.manual_seed(0)
x = torch.randn(32, 4)
model = run.wrap(fully_shard(nn.Linear(4, 4), mesh=run.mesh["shard"]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
average = Average(model)
run.track(optimizer=optimizer, average=average)
loader = run.loader(DataLoader(TensorDataset(x, x), batch_size=8), global_batch=8)


def train():
    for epoch in run.epochs(1):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                average.update(model)


run.retry(train)
result = {"none": torch.zeros(1)}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "warns"), [("detach().to_local()", True), ("detach().full_tensor()", False)]
)
def test_an_average_of_shards_causes_a_warning(
    runs: IdiomRuns, tmp_path: Path, shard: str, warns: bool
) -> None:
    """A checkpoint has those of rank 0 only, with which every rank would resume."""
    script = tmp_path / "script.py"
    script.write_text(AVERAGE_OF_SHARDS.replace("SHARD", shard))
    outcome = runs.world.run(script, tmp_path / "job", size=4, per_node=2)
    outcome.assert_success(workers=4)
    warning = "the tracked 'average' differs between ranks"
    assert outcome.describe().count(warning) == (4 if warns else 0), outcome.describe()
    assert ("ema = run.wrap(ema)" in outcome.describe()) is warns


def test_batch_statistics_of_a_tracked_model_may_differ(runs: IdiomRuns, tmp_path: Path) -> None:
    """A teacher in train mode normalises by its rank's samples."""
    script = tmp_path / "script.py"
    body = """
teacher = nn.BatchNorm1d(4)
run.track(teacher=teacher)

def train():
    for epoch in run.epochs(1):
        for inputs, targets in loader:
            teacher(inputs)
            STEP
"""
    script.write_text(HEAD + TRAINED + body.replace("STEP", STEP) + TAIL)
    outcome = runs.world.run(script, tmp_path / "job", size=3)
    outcome.assert_success(workers=3)
    assert "differs between ranks" not in outcome.describe()


def test_a_joining_node_does_not_wait_in_a_retry_that_others_have_completed(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """It once waited for the other ranks, which trained in the next run.retry."""
    script = tmp_path / "script.py"
    body = """
def train(epochs):
    for epoch in run.epochs(epochs):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            die(epoch * 8 + i, 11)
    run.mean(1.0, score=float(epochs))

run.retry(train, 1)
run.retry(train, 2)
result = dict(model.state_dict())
"""
    script.write_text(HEAD + TRAINED + body.replace("STEP", STEP))
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    assert not outcome.survivors
    *_, joining = outcome.workers
    assert "run.mean() was called on a joining node" in joining.error, outcome.describe()
    assert "an earlier run.retry has called run.mean() outside of its loops" in outcome.describe()


def test_a_joining_node_receives_buffers_that_got_their_shape_in_training(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """Those of quantisation-aware training: its observers are empty at first."""
    script = tmp_path / "script.py"
    body = """
from torch.ao.quantization.observer import PerChannelMinMaxObserver

class Observed(nn.Module):
    def __init__(self):
        super().__init__()
        self.network, self.observer = network, PerChannelMinMaxObserver()

    def forward(self, x):
        self.observer(self.network[0].weight)
        return self.network(x)

model = run.wrap(Observed())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

def train():
    for epoch in run.epochs(1):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            die(i, 5)
"""
    script.write_text(HEAD + body.replace("STEP", STEP) + TAIL)
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    outcome.assert_success(workers=3)
    least = [w.result["module.observer.min_val"] for w in outcome.survivors]
    assert all(value.shape == (256,) and value.equal(least[0]) for value in least)
