"""Work of ``run.once`` at its worst places: while rank 0 still writes and others have finished,
after it on one rank only, between two calls of ``run.retry``, and before all nodes are killed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from catalogue import idioms
from idiom_runs import SIZE, IdiomRuns, assert_same

from elastic.testing.small_world.world import STOP, Death, RunOutcome, SmallWorld

SCRIPT = """
import os, signal, sys, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic
from elastic.train.units import Units

place, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
run = elastic.join(checkpoints=folder, when=2)
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
run.state.update(saved=[], values=0.0, epoch=0)
trained = []  # by this process: steps in which it had a batch
meet = Units._barrier


def die_at(name, *, is_last=False):
    world = run.world
    if place != name or world.generation != 1:
        return
    mark = f"{folder}-{name}"
    if world.rank == rank:
        while is_last and len(os.listdir(mark) if os.path.isdir(mark) else ()) < world.size - 1:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    os.makedirs(mark, exist_ok=True)
    open(f"{mark}/{world.rank}", "w").close()


def meet_or_die(units):
    die_at("before the meeting", is_last=True)
    meet(units)
    die_at("after the meeting")


Units._barrier = meet_or_die


def save(epoch):
    die_at("in the save", is_last=True)
    run.state["saved"].append([epoch, optimizer.state_dict()["state"][0]["step"].item()])
    return run.mean(1.0, epoch=epoch)["epoch"]


def train(epoch):
    if run.state["epoch"] > epoch:
        return
    for i, (inputs, targets) in enumerate(loader, start=loader.index):
        trained.append((epoch, i))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    value = run.once("save", save, epoch)
    die_at("after the unit", is_last=True)
    run.state["values"] += value
    run.state["epoch"] = epoch + 1


for epoch in range(3):
    run.retry(train, epoch, is_last=False)
    if epoch == 1:
        die_at("between two calls", is_last=True)
result = {**model.state_dict(), "saved": torch.tensor(run.state["saved"]),
          "values": torch.tensor(run.state["values"])}
repeated = len(trained) - len(set(trained))
print(f"repeated {repeated} steps")
"""
NEVER = 1_000_000_000  # the script kills itself
PLACES = (
    "in the save",
    "before the meeting",
    "after the meeting",
    "after the unit",
    "between two calls",
)


@dataclass
class UnitRuns:
    """Runs of the script, and the results of undisturbed ones."""

    world: SmallWorld
    script: Path
    _undisturbed: dict[str, torch.Tensor] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def folder(self) -> Path:
        return self.script.with_name(f"run-{next(self._number)}")

    def run(
        self,
        place: str,
        rank: int = 0,
        *,
        is_replaced: bool = False,
        on_death: str = "recover",
        checkpoints: Path | None = None,
    ) -> RunOutcome:
        folder = self.folder()
        return self.world.run(
            self.script,
            folder,
            size=SIZE,
            arguments=[place, str(rank), str(checkpoints or folder.with_suffix(".saved"))],
            death=Death(rank=rank, event=NEVER) if place else None,
            is_replaced=is_replaced,
            on_death=on_death,
            limit_s=60.0,
        )

    def assert_exact(self, outcome: RunOutcome) -> None:
        if not self._undisturbed:
            undisturbed = self.run("")
            undisturbed.assert_success(workers=SIZE)
            self._undisturbed = undisturbed.survivors[0].result
        for worker in outcome.survivors:
            for name, value in self._undisturbed.items():
                torch.testing.assert_close(
                    worker.result[name], value, rtol=1e-9, atol=1e-9, msg=outcome.describe()
                )


@pytest.fixture(scope="module")
def units(runs: IdiomRuns, tmp_path_factory: pytest.TempPathFactory) -> UnitRuns:
    script = tmp_path_factory.mktemp("units") / "script.py"
    script.write_text(SCRIPT)
    return UnitRuns(runs.world, script)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "is_replaced",
    [pytest.param(False, id="alone"), pytest.param(True, id="replaced", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=pytest.mark.slow if "after" in p else ()) for p in PLACES]
)
def test_work_is_done_once_and_no_step_is_repeated(
    units: UnitRuns, place: str, rank: int, is_replaced: bool
) -> None:
    outcome = units.run(place, rank, is_replaced=is_replaced)
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert outcome.workers[rank].exit_code is None, "nobody has died"
    units.assert_exact(outcome)
    for worker in outcome.survivors:
        assert worker.steps == 24, outcome.describe()
        if place != "between two calls":  # the others have begun the next step
            assert "repeated 0 steps" in worker.log, outcome.describe()


@pytest.mark.parametrize(
    "place", ["in the save", pytest.param("between two calls", marks=pytest.mark.slow)]
)
def test_a_job_whose_nodes_are_all_killed_continues_exactly(units: UnitRuns, place: str) -> None:
    saved = units.folder().with_suffix(".saved")
    killed = units.run(place, on_death=STOP, checkpoints=saved)
    assert not killed.survivors, killed.describe()
    resumed = units.run("", checkpoints=saved)
    resumed.assert_success(workers=SIZE)
    assert "source='initial'" not in resumed.workers[0].log
    units.assert_exact(resumed)


@pytest.mark.parametrize(
    "line", [pytest.param("return run.mean(1.0", marks=pytest.mark.slow), 'run.state["called"] =']
)
def test_a_step_in_which_a_loop_is_left_ends_with_the_code_after_it(
    runs: IdiomRuns, line: str
) -> None:
    """A death in the work after an epoch, or where its last step is committed, must not run this
    code again: it counts epochs."""
    idiom = next(each for each in idioms() if each.name == "break_in_the_last_step")
    lines = idiom.path.read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if line in text)
    event = 2 if line.startswith("return") else 6  # of the second epoch, of the first
    outcome = runs.with_death(idiom, Death(rank=1, event=event, line=number), is_replaced=True)
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=SIZE)
    assert_same(idiom, outcome, runs.alone(idiom))
