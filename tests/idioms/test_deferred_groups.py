"""Scripts that call torch.distributed.init_process_group() themselves, as for any launcher."""

from __future__ import annotations

from pathlib import Path

import torch
from idiom_runs import SIZE, IdiomRuns

from elastic.testing.small_world.world import Death

SCRIPT = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import DataLoader, TensorDataset
import elastic

run = elastic.join()
init_process_group("gloo")
before = {
    "rank before": dist.get_rank(),
    "size before": dist.get_world_size(),
    "size in the environment": int(os.environ["WORLD_SIZE"]),
    "port": int(os.environ["MASTER_PORT"]),
}
assert not run.has_world and not run.in_step and run.largest_world == 3

def main():
    init_process_group("gloo")
    if dist.get_rank() == 0:
        pass  # prepare data
    dist.barrier()
    torch.manual_seed(0)
    x = torch.randn(96, 4, dtype=torch.float64)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model = run.wrap(nn.Linear(4, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(optimizer=optimizer)
    loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            assert run.in_step and run.has_world
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            dist.all_reduce(loss.detach())
            assert dist.get_world_size() == run.world.size == int(os.environ["WORLD_SIZE"])
            optimizer.step()
        assert not run.in_step
    destroy_process_group()
    return model

model = run.retry(main)
destroy_process_group()
result = {**before, "rank": run.world.rank, "weight": model.module.weight}
"""


def test_ranks_before_the_first_world_are_those_of_the_largest(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    line = SCRIPT.splitlines().index("            optimizer.step()") + 1
    death = Death(rank=0, event=5, line=line)
    outcome = runs.world.run(path, tmp_path / "out", death=death, is_replaced=True)
    outcome.assert_success(workers=SIZE)
    assert outcome.died_at and outcome.worlds == 2
    first, second, joined = (worker.result for worker in outcome.survivors)
    assert [int(r["rank before"]) for r in (first, second, joined)] == [1, 2, 2]
    assert {int(r["rank"]) for r in (first, second, joined)} == {0, 1, 2}
    for each in (first, second, joined):
        assert int(each["size before"]) == int(each["size in the environment"]) == 3
        assert torch.equal(each["weight"], first["weight"])


OTHERWISE = """
import torch
import torch.distributed as dist
from torch import nn
import elastic

kept = [dist.init_process_group]  # as in a library's table of functions
run = elastic.join()

def main():
    kept[0]("gloo")
    run.wrap(nn.Linear(4, 1))
    for epoch in run.epochs(2):
        pass

run.retry(main)
"""


def test_a_group_that_is_created_otherwise_within_retry_is_named(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """Otherwise the first world fails (its port is in use), and the next destroys the group."""
    path = tmp_path / "script.py"
    path.write_text(OTHERWISE)
    outcome = runs.world.run(path, tmp_path / "out")
    assert not outcome.survivors
    errors = [worker.error for worker in outcome.workers if worker.error]
    assert errors, outcome.describe()
    for error in errors:
        assert "created a process group of 3 ranks (gloo)" in error, outcome.describe()
