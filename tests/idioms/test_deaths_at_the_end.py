"""Deaths after the last step: functions that compare their count of steps after a step only.

Called again, such a function trains another step, or never ends. A rank dies after its last step
was committed: in the function, while the job is saved, or in a later call of ``run.retry``, which a
joining node reaches through the earlier one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from idiom_runs import SIZE, IdiomRuns

from elastic.testing.small_world.world import Death, RunOutcome, SmallWorld

SCRIPT = """
import os, signal, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic
from elastic.train.loop import Commits

way, place, mark = sys.argv[1:]
STEPS = 6
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
if way == "loader":
    loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
run.state.update(first=0, second=0)
ends = 0
finish = Commits.finish


def die(at):
    # Rank 1 dies, once rank 0 is as far: otherwise it may be interrupted in its own commit, and a
    # call whose last step others have completed has no value.
    world = run.world
    if place == at and world.generation == 1:
        if world.rank == 0:
            open(mark, "w").close()
        while world.rank == 1:
            if os.path.exists(mark):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.001)


def finish_or_die(commits):
    global ends
    ends += 1
    finish(commits)
    die(f"the end of call {ends}")


Commits.finish = finish_or_die


def cycle():
    while True:
        yield from loader


def update(inputs, targets):
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def train(name):
    if way == "loader":
        for inputs, targets in cycle():
            update(inputs, targets)
            run.state[name] += 1
            if run.state[name] == STEPS:
                break
    while way == "commits":
        run.begin()
        rows = x[:12].chunk(run.world.size)[run.world.rank]
        update(rows, rows.sin().sum(1, keepdim=True))
        run.state[name] += 1
        run.commit()
        die(f"{name}, step {run.state[name]}")
        if run.state[name] == STEPS:
            break
    return run.state[name]


counts = [run.retry(train, name) for name in ("first", "second")]
result = {**model.state_dict(), "counts": torch.tensor([float(run.state["first"]),
                                                        float(run.state["second"])])}
print("returned", *counts[:1], "and", counts[1])
"""
STEPS = 6
NEVER = 1_000_000_000  # the script kills itself
PLACES = (
    f"first, step {STEPS}",
    "the end of call 1",
    "second, step 2",
    f"second, step {STEPS}",
    "the end of call 2",
)


@dataclass
class EndRuns:
    """Runs of the script, and the results of undisturbed ones."""

    world: SmallWorld
    script: Path
    _undisturbed: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, way: str, place: str, *, is_replaced: bool = False) -> RunOutcome:
        folder = self.script.with_name(f"run-{next(self._number)}")
        return self.world.run(
            self.script,
            folder,
            size=SIZE,
            arguments=[way, place, str(folder.with_suffix(".mark"))],
            death=Death(rank=1, event=NEVER) if place else None,
            is_replaced=is_replaced,
            limit_s=60.0,
        )

    def undisturbed(self, way: str) -> dict[str, torch.Tensor]:
        if way not in self._undisturbed:
            outcome = self.run(way, "")
            outcome.assert_success(workers=SIZE)
            self._undisturbed[way] = outcome.survivors[0].result
        return self._undisturbed[way]


@pytest.fixture(scope="module")
def ends(runs: IdiomRuns, tmp_path_factory: pytest.TempPathFactory) -> EndRuns:
    script = tmp_path_factory.mktemp("ends") / "script.py"
    script.write_text(SCRIPT)
    return EndRuns(runs.world, script)


@pytest.mark.parametrize(
    "is_replaced",
    [pytest.param(False, id="alone"), pytest.param(True, id="replaced", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("way", "place"),
    [
        (way, place)
        for way in ("commits", "loader")
        for place in PLACES
        if way == "commits" or "end" in place  # in a loop over a loader, a step is committed later
    ],
)
def test_no_step_is_trained_after_the_last_one(
    ends: EndRuns, way: str, place: str, is_replaced: bool
) -> None:
    outcome = ends.run(way, place, is_replaced=is_replaced)
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert outcome.workers[1].exit_code is None, "nobody has died"
    for worker in outcome.survivors:
        assert worker.steps == 2 * STEPS, outcome.describe()
        for name, value in ends.undisturbed(way).items():
            torch.testing.assert_close(worker.result[name], value, rtol=1e-9, atol=1e-9)
    assert "returned 6 and 6" in outcome.workers[0].log, "survivors return their own values"
