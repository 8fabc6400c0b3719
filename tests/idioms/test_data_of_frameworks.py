"""Updates of a framework on its largest world, in any world: the weights of plain
DistributedDataParallel over a ``DistributedSampler``, with accumulation, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from idiom_runs import SIZE, IdiomRuns, assert_results
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from elastic.testing.small_world.world import Death, RunOutcome

EPOCHS, SEED = 3, 7
SAMPLES, BATCH, ACCUMULATED = 41, 2, 3
EXACT = 1e-12

HEAD = f"""
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn({SAMPLES}, 4)
tokens = torch.randint(1, 9, ({SAMPLES},))
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True), tokens)
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def order(epoch):
    generator = torch.Generator().manual_seed({SEED} + epoch)
    indices = torch.randperm(len(dataset), generator=generator).tolist()
    return indices + indices[: -len(indices) % {SIZE}]  # padded as by DistributedSampler

run = elastic.join()
model = run.wrap(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(
    DataLoader(dataset, batch_size={BATCH}, shuffle=True, num_workers=int(sys.argv[1])),
    order=order, micro_batches={ACCUMULATED}, weights=sys.argv[2],
)
"""
TAIL = """
run.retry(train)
result = dict(network.state_dict())
"""
OF_SAMPLES = """
def train():
    for epoch in run.epochs(3):
        for step in run.steps(loader):
            optimizer.zero_grad()
            for inputs, targets, _ in step:
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
"""
# Several batches are read ahead, as by Trainer.get_batch_samples.
OF_SAMPLES_READ_AHEAD = """
def train():
    for epoch in run.epochs(3):
        for step in run.steps(loader):
            optimizer.zero_grad()
            batches = list(step)
            for number, (inputs, targets, _) in enumerate(batches):
                with model.no_sync() if number + 1 < len(batches) else torch.enable_grad():
                    loss = F.mse_loss(model(inputs), targets)
                    (loss * loader.share.mean_weights[number]).backward()
            optimizer.step()
"""
OF_TOKENS = """
def train():
    for epoch in run.epochs(3):
        for step in run.steps(loader):
            optimizer.zero_grad()
            batches = list(step)
            share = loader.share
            counted = [
                counts * (len(mine) > 0)
                for (_, _, counts), mine in zip(batches, share.micro_batches, strict=True)
            ]
            total = sum(counts.sum() for counts in counted)
            dist.all_reduce(total)
            for number, (inputs, targets, _) in enumerate(batches):
                with model.no_sync() if number + 1 < len(batches) else torch.enable_grad():
                    squares = (model(inputs) - targets).square().squeeze(1)
                    loss = (squares * counted[number]).sum() / total
                    (loss * share.ranks).backward()
            optimizer.step()
"""


def updates(epoch: int) -> Iterator[list[list[list[int]]]]:
    """What each rank of the largest world reads in each update of plain training: its batches."""
    ranks = []
    for rank in range(SIZE):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(SAMPLES),  # type: ignore[arg-type]
            num_replicas=SIZE,
            rank=rank,
            seed=SEED,
        )
        sampler.set_epoch(epoch)
        ranks.append([b.tolist() for b in DataLoader(range(SAMPLES), BATCH, sampler=sampler)])  # type: ignore[arg-type]
    for first in range(0, len(ranks[0]), ACCUMULATED):
        yield [batches[first : first + ACCUMULATED] for batches in ranks]


def plain(*, by_tokens: bool) -> dict[str, torch.Tensor]:
    """The weights after plain training on the largest world, computed by one process."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    tokens = torch.randint(1, 9, (SAMPLES,))
    targets = x.sin().sum(1, keepdim=True)
    with torch.random.fork_rng(devices=[]):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        for ranks in updates(epoch):
            optimizer.zero_grad()
            total = sum(int(tokens[batch].sum()) for batches in ranks for batch in batches)
            for batch in (batch for batches in ranks for batch in batches):
                if by_tokens:
                    squares = (network(x[batch]) - targets[batch]).square().squeeze(1)
                    loss = (squares * tokens[batch]).sum() / total * SIZE
                else:
                    # As the frameworks do; here all batches of an update have the same size.
                    loss = F.mse_loss(network(x[batch]), targets[batch]) / len(ranks[0])
                (loss / SIZE).backward()  # DDP averages
            optimizer.step()
    return network.state_dict()


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, torch.Tensor]]:
    return {"samples": plain(by_tokens=False), "equal": plain(by_tokens=True)}


SCRIPTS = {
    "samples": (OF_SAMPLES, "samples"),
    "samples, read ahead": (OF_SAMPLES_READ_AHEAD, "samples"),
    "samples, read ahead, equal weights": (OF_SAMPLES_READ_AHEAD, "equal"),
    "tokens": (OF_TOKENS, "equal"),
}
EQUAL_TO = {"tokens": "equal"}


def run_script(
    runs: IdiomRuns,
    folder: Path,
    name: str,
    *,
    size: int = SIZE,
    workers: int = 0,
    death: Death | None = None,
    is_replaced: bool = False,
) -> RunOutcome:
    body, weights = SCRIPTS[name]
    path = folder / "script.py"
    path.write_text(HEAD + body + TAIL)
    return runs.world.run(
        path,
        folder / f"size-{size}-{death and death.event}",
        size=size,
        arguments=[str(workers), weights],
        death=death,
        is_replaced=is_replaced,
    )


def test_the_last_update_is_shorter() -> None:
    sizes = [len(ranks[0]) for ranks in updates(0)]
    assert sizes == [ACCUMULATED, ACCUMULATED, 1]
    assert [len(batch) for batch in [*updates(0)][-1][0]] == [BATCH]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_weights_are_those_of_plain_training(
    runs: IdiomRuns,
    tmp_path: Path,
    expected: dict[str, dict[str, torch.Tensor]],
    name: str,
    size: int,
) -> None:
    outcome = run_script(runs, tmp_path, name, size=size, workers=2 * (name == "samples"))
    outcome.assert_success(workers=size)
    assert_results(outcome, expected[EQUAL_TO.get(name, "samples")], tolerance=EXACT)
    steps = EPOCHS * math.ceil(math.ceil(SAMPLES / SIZE) / BATCH / ACCUMULATED)
    assert {worker.steps for worker in outcome.workers} == {steps}


@pytest.mark.parametrize(
    "name",
    [n if "equal" in SCRIPTS[n] else pytest.param(n, marks=pytest.mark.slow) for n in SCRIPTS],
)
@pytest.mark.parametrize(
    "is_replaced",
    [
        pytest.param(False, id="death", marks=pytest.mark.slow),
        pytest.param(True, id="death and join"),
    ],
)
def test_deaths_and_joins_change_nothing(
    runs: IdiomRuns,
    tmp_path: Path,
    expected: dict[str, dict[str, torch.Tensor]],
    name: str,
    is_replaced: bool,
) -> None:
    undisturbed = run_script(runs, tmp_path, name)
    undisturbed.assert_success(workers=SIZE)
    rank = len(name) % SIZE
    lines = undisturbed.workers[rank].lines
    for event in (lines // 5, lines // 2, lines - 3):
        outcome = run_script(
            runs, tmp_path, name, death=Death(rank=rank, event=event), is_replaced=is_replaced
        )
        outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
        assert outcome.died_at
        assert_results(outcome, expected[EQUAL_TO.get(name, "samples")], tolerance=EXACT)


# -- orders of ranks that differ ------------------------------------------------------------------

DIFFERING = """
import os
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
import elastic

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x.sum(1, keepdim=True))

def order(epoch):
    seed = epoch + (100 * int(os.environ["RANK"]) if epoch == 1 else 0)
    return torch.randperm(40, generator=torch.Generator().manual_seed(seed)).tolist()

class OfRank(Sampler):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        return iter(order(self.epoch))

run = elastic.join()
model = run.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
LOADER

def train():
    for epoch in run.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

run.retry(train)
result = model.state_dict()
"""


@pytest.mark.parametrize(
    "loader",
    [
        "loader = run.loader(DataLoader(dataset, batch_size=4), order=order)",
        "loader = run.loader(DataLoader(dataset, batch_size=4, sampler=OfRank()))",
    ],
    ids=["order=", "a sampler of one's own"],
)
def test_an_order_that_depends_on_the_rank_ends_the_job_on_all_ranks(
    runs: IdiomRuns, tmp_path: Path, loader: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(DIFFERING.replace("LOADER", loader))
    outcome = runs.world.run(path, tmp_path / "out")
    assert not outcome.survivors
    assert outcome.worlds == 1
    errors = [worker.error for worker in outcome.workers if worker.error]
    assert errors, outcome.describe()
    for error in errors:
        assert "step 4 read epoch 1 in another order on rank 1 than on rank 0" in error


# -- accumulation over batches that are steps ------------------------------------------------------

OVER_STEPS = """
import contextlib
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(37, 4)  # three steps of 12, then one of a single sample
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

def train():
    for epoch in run.epochs(3):
        optimizer.zero_grad()
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            is_last = (i + 1) % 4 == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                (F.mse_loss(model(inputs), targets) / 4).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

run.retry(train)
result = model.state_dict()
"""


def test_a_group_of_batches_may_end_with_fewer_samples_than_ranks(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(OVER_STEPS)
    alone = runs.world.run(path, tmp_path / "alone", size=1)
    alone.assert_success(workers=1)
    weights = alone.survivors[0].result
    undisturbed = runs.world.run(path, tmp_path / "undisturbed")
    undisturbed.assert_success(workers=SIZE)
    assert_results(undisturbed, weights, tolerance=EXACT)
    for part in (2, 3):
        death = Death(rank=2, event=undisturbed.workers[2].lines // part)
        outcome = runs.world.run(path, tmp_path / f"death-{part}", death=death, is_replaced=True)
        outcome.assert_success(workers=SIZE)
        assert_results(outcome, weights, tolerance=EXACT)


# -- losses of a batch ----------------------------------------------------------------------------

OF_A_BATCH = """
def train():
    for epoch in run.epochs(2):
        for step in run.steps(loader):
            optimizer.zero_grad()
            batches = list(step)
            for (inputs, targets, _), weight in zip(batches, loader.share.mean_weights):
                assert len(inputs) <= 2
                (weight * (model(inputs) - targets).square().amax()).backward()
            optimizer.step()
"""


def test_whole_batches_are_the_same_in_every_world(runs: IdiomRuns, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    head = HEAD.replace("weights=sys.argv[2]", "weights='equal', whole_batches=True")
    script.write_text(head + OF_A_BATCH + TAIL)
    alone = runs.world.run(script, tmp_path / "alone", size=1, arguments=["0"])
    alone.assert_success(workers=1)
    death = Death(rank=1, event=40)
    ran = runs.world.run(script, tmp_path / "job", size=SIZE, arguments=["0"], death=death)
    ran.assert_success(workers=SIZE - 1)
    assert_results(ran, alone.survivors[0].result, tolerance=EXACT)
