"""``run.build`` in a small world: a worker dies at any line, with the result of one worker.

The memory tier is real: one host process that outlives the workers and holds all shares.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from idiom_runs import SIZE, IdiomRuns

from checkpoints.memory import MemoryHost
from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome

FIXED = "memory=3"
CHOSEN = "memory_overhead=1.0"  # by all ranks, in each world and after its second save
SCRIPT = """
import os
os.environ["ELASTIC_NODE_MEMORY"] = {memory!r}
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
import elastic

torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
run = elastic.join(checkpoints=elastic.Checkpoints({disk!r}, when=1000, {saves}))
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=8)
result = {{}}

def build(mesh):
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def train():
    model, optimizer = run.build(build)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)
    run.track(scheduler=scheduler)
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            F.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    result.update({{name: value.full_tensor() for name, value in model.state_dict().items()}})

run.retry(train)
"""

Train = Callable[..., RunOutcome]


@pytest.fixture(scope="module")
def train(runs: IdiomRuns, tmp_path_factory: pytest.TempPathFactory) -> Train:
    number = itertools.count()

    def run(
        size: int = SIZE,
        death: Death | None = None,
        *,
        is_replaced: bool = False,
        saves: str = FIXED,
    ) -> RunOutcome:
        folder = tmp_path_factory.mktemp(f"built-{next(number)}")
        host = MemoryHost(folder / "memory")
        try:
            script = folder / "script.py"
            memory, disk = str(folder / "memory"), str(folder / "disk")
            script.write_text(SCRIPT.format(memory=memory, disk=disk, saves=saves))
            return runs.world.run(script, folder, size=size, death=death, is_replaced=is_replaced)
        finally:
            host.close()

    return run


@pytest.fixture(scope="module")
def alone(train: Train) -> dict[str, torch.Tensor]:
    outcome = train(size=1)
    outcome.assert_success(workers=1)
    return outcome.survivors[0].result


@pytest.fixture(scope="module")
def undisturbed(train: Train) -> RunOutcome:
    outcome = train()
    outcome.assert_success(workers=SIZE)
    return outcome


def assert_same(outcome: RunOutcome, alone: dict[str, torch.Tensor]) -> None:
    assert alone
    for worker in outcome.survivors:
        assert worker.result.keys() == alone.keys(), outcome.describe()
        for name, value in alone.items():
            torch.testing.assert_close(worker.result[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_three_ranks_with_uneven_shares_train_like_one(
    undisturbed: RunOutcome, alone: dict[str, torch.Tensor]
) -> None:
    assert_same(undisturbed, alone)


@pytest.mark.parametrize(
    ("counted", "is_replaced"),
    [
        pytest.param(LINES, False, id="lines-fewer", marks=pytest.mark.slow),
        pytest.param(LINES, True, id="lines-replaced", marks=pytest.mark.slow),
        pytest.param(CALLS, False, id="calls-fewer", marks=pytest.mark.slow),
        pytest.param(CALLS, True, id="calls-replaced", marks=pytest.mark.slow),
    ],
)
def test_a_death_does_not_change_the_result(
    train: Train,
    undisturbed: RunOutcome,
    alone: dict[str, torch.Tensor],
    counted: str,
    is_replaced: bool,
) -> None:
    check(train, undisturbed, alone, 0, counted, is_replaced)


@pytest.mark.slow
def test_a_death_with_automatic_saves_does_not_change_the_result(
    train: Train, undisturbed: RunOutcome, alone: dict[str, torch.Tensor]
) -> None:
    check(train, undisturbed, alone, 0, CALLS, True, saves=CHOSEN)


# The same at more lines.
@pytest.mark.soak
@pytest.mark.parametrize("is_replaced", [False, True], ids=["fewer", "replaced"])
@pytest.mark.parametrize("counted", [LINES, CALLS])
@pytest.mark.parametrize("seed", range(1, 12))
def test_a_death_anywhere_does_not_change_the_result(
    train: Train,
    undisturbed: RunOutcome,
    alone: dict[str, torch.Tensor],
    seed: int,
    counted: str,
    is_replaced: bool,
) -> None:
    saves = CHOSEN if seed % 2 else FIXED
    check(train, undisturbed, alone, seed, counted, is_replaced, saves=saves)


def check(
    train: Train,
    undisturbed: RunOutcome,
    alone: dict[str, torch.Tensor],
    seed: int,
    counted: str,
    is_replaced: bool,
    saves: str = FIXED,
) -> None:
    draw = random.Random(f"built/{seed}/{counted}/{is_replaced}")
    rank = draw.randrange(SIZE)
    worker = undisturbed.workers[rank]
    last = int(worker.calls * 0.9) if counted == CALLS else worker.lines
    death = Death(rank=rank, event=draw.randint(1, last), counted=counted)
    outcome = train(death=death, is_replaced=is_replaced, saves=saves)
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert_same(outcome, alone)
