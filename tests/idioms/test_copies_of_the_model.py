"""Copies of the model that differ between ranks: a reference model of a script without a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from idiom_runs import SIZE, IdiomRuns

SCRIPT = """
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader
import elastic

torch.seed()
run = elastic.join()
policy = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
reference = copy.deepcopy(policy.module).requires_grad_(False)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(torch.ones(24, 4), batch_size=4), global_batch=6)

def train():
    for epoch in run.epochs(1):
        for inputs in loader:
            optimizer.zero_grad()
            (policy(inputs) - reference(inputs) - 1).pow(2).mean().backward()
            optimizer.step()

run.retry(train)
result = {f"reference.{k}": v for k, v in reference.state_dict().items()}
"""
REMEDIES = {
    "a tracked copy": ("optimizer=optimizer)", "optimizer=optimizer, reference=reference)"),
    "a seed": ("torch.seed()", "torch.manual_seed(0)"),
}
WARNING = "reference has other weights on each rank"


def test_a_copy_that_differs_between_ranks_causes_a_warning(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outcome = runs.world.run(script, tmp_path / "out")
    outcome.assert_success(workers=SIZE)
    assert all(WARNING in worker.log for worker in outcome.workers), outcome.describe()
    assert "run.track(reference=reference)" in outcome.workers[0].log


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedies_give_all_ranks_the_same_copy(
    runs: IdiomRuns, tmp_path: Path, remedy: str
) -> None:
    before, after = REMEDIES[remedy]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace(before, after, 1))
    outcome = runs.world.run(script, tmp_path / "out")
    outcome.assert_success(workers=SIZE)
    assert WARNING not in outcome.describe()
    first, *others = (worker.result for worker in outcome.workers)
    for other in others:
        assert all(other[name].equal(value) for name, value in first.items())
