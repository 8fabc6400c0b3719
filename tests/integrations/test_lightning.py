"""Lightning with recovery in process: equal to plain Lightning on the largest world, undisturbed.

Weights, counters, learning rates, validations, callbacks, files and log entries are compared.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.plain_store import plain_store

from elastic.testing.small_world.world import STOP, Death, RunOutcome, SmallWorld

# Not imported here, which takes seconds in each process of pytest.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs torch-elastic-harness[lightning]"
)

SCRIPT = Path(__file__).parent / "scripts" / "lightning_script.py"
SIZE = 3
EQUAL = 1e-12
DEVICE = "kit.shared_gpu:share_if_told"

Options = dict[str, Any]


@pytest.fixture(scope="module")
def world() -> Iterator[SmallWorld]:
    with SmallWorld(prepare=DEVICE, imports=["lightning.pytorch", "torchmetrics"]) as made:
        yield made


def line_of(place: str) -> int:
    """The line of the script that runs in a training step, a validation, a save or a test."""
    lines = SCRIPT.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# died in a {place}"))


def death(place: str, event: int, rank: int) -> Death:
    return Death(rank=rank, event=event, line=line_of(place))


@dataclass
class Lightning:
    """Runs of the script with the same options. ``plain``: by plain Lightning, undisturbed."""

    world: SmallWorld
    folder: Path
    options: Options

    def run(self, name: str, *, size: int = SIZE, **options: Any) -> RunOutcome:
        given = {**self.options, "folder": str(self.folder / name), **options.pop("script", {})}
        return self.world.run(
            SCRIPT,
            self.folder / f"{name}-run",
            size=size,
            arguments=[json.dumps(given)],
            is_counted=False,
            **options,
        )

    @functools.cached_property
    def plain(self) -> dict[str, torch.Tensor]:
        with plain_store() as environment:
            script = {"strategy": "ddp", "environment": environment}
            outcome = self.run("plain", size=1, script=script)
        outcome.assert_success(workers=1)
        return outcome.survivors[0].result

    def assert_as_plain(self, name: str, outcome: RunOutcome, *, workers: int) -> None:
        outcome.assert_success(workers=workers)
        for worker in outcome.survivors:
            assert worker.result.keys() == self.plain.keys()
            for key, value in self.plain.items():
                given = worker.result[key].double()
                torch.testing.assert_close(given, value.double(), rtol=0, atol=EQUAL, msg=key)
        assert self.files(name) == self.files("plain")
        assert self.entries(name) == self.entries("plain")

    def files(self, name: str) -> list[str]:
        saved = (self.folder / name / "saved").glob("*.ckpt")
        return sorted(path.name for path in saved)

    def entries(self, name: str) -> list[dict[str, float]]:
        paths = list((self.folder / name).rglob("metrics.csv"))
        if self.options.get("logger", "csv") != "csv":
            assert not paths
            return []
        (path,) = paths
        with path.open() as file:
            return [
                {key: round(float(v), 9) for key, v in row.items() if v}
                for row in csv.DictReader(file)
            ]


Make = Callable[..., Lightning]


@pytest.fixture
def lightning(world: SmallWorld, tmp_path: Path) -> Make:
    return lambda **options: Lightning(world, tmp_path, options)


EVERYDAY: Options = {
    "ema": True,
    "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 0.5},
}
DEATHS = {
    "a training step": ("training step", 8, 1),
    "a training step of rank 0": ("training step", 9, 0),
    "a validation": ("validation", 3, 1),
    "a validation of rank 0": ("validation", 5, 0),
    "the sanity check": ("validation", 1, 2),
    "a save of rank 0": ("save", 2, 0),
}


QUICK = ("a training step of rank 0", "a save of rank 0")


@pytest.mark.parametrize(
    "places", [QUICK, pytest.param(DEATHS, marks=pytest.mark.slow)], ids=["quick", "all"]
)
def test_an_everyday_script_equals_plain_lightning(lightning: Make, places: Iterable[str]) -> None:
    jobs = lightning(**EVERYDAY)
    if places is not QUICK:
        jobs.assert_as_plain("elastic", jobs.run("elastic"), workers=SIZE)
    for name in places:
        outcome = jobs.run(name, death=death(*DEATHS[name]))
        assert outcome.died_at
        jobs.assert_as_plain(name, outcome, workers=SIZE - 1)
    outcome = jobs.run("join", death=death("training step", 12, 2), is_replaced=True)
    jobs.assert_as_plain("join", outcome, workers=SIZE)


def test_a_mean_over_tokens_survives_a_death(lightning: Make) -> None:
    """Each rank of the smaller world has batches of the largest one."""
    jobs = lightning(tokens=True, epochs=1, trainer={"accumulate_grad_batches": 2})
    outcome = jobs.run("killed", death=death("training step", 3, 0))
    assert outcome.died_at
    jobs.assert_as_plain("killed", outcome, workers=SIZE - 1)


SCRIPTS: dict[str, Options] = {
    "early stopping, plateau, data workers, saves by step": {
        "workers": 1,
        "patience": 1,
        "epochs": 6,
        "scheduler": "plateau",
        "save": {"every_n_train_steps": 2, "save_top_k": -1},
    },
    "manual optimization": {"manual": True, "scheduler": "", "epochs": 2},
    "accumulation in manual optimization": {
        "manual": True,
        "accumulates": 2,
        "scheduler": "",
        "epochs": 2,
        "samples": 48,
    },
    "TensorBoard, own sampler": {"logger": "tensorboard", "sampler": True, "epochs": 2},
    "two optimizers": {"gan": True, "manual": True, "scheduler": "", "epochs": 2},
    "several loaders, averaged weights": {
        "loaders": 2,
        "samples": 48,
        "averaging": True,
        "epochs": 2,
        "scheduler": "epoch",
        "trainer": {"accumulate_grad_batches": 3},
    },
    "loaders of each epoch": {
        "epochs": 2,
        "trainer": {"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1},
    },
    "overfitting": {"epochs": 3, "trainer": {"overfit_batches": 4}},
    "limits": {"epochs": 2, "trainer": {"limit_train_batches": 4, "max_steps": 6}},
}


SLOW = {
    "manual optimization",
    "early stopping, plateau, data workers, saves by step",
    "accumulation in manual optimization",
    "TensorBoard, own sampler",
    "two optimizers",
    "loaders of each epoch",
    "limits",
    "overfitting",
    "several loaders, averaged weights",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SCRIPTS]
)
def test_other_scripts_equal_plain_lightning(lightning: Make, name: str) -> None:
    jobs = lightning(**SCRIPTS[name])
    outcome = jobs.run("killed", death=death("training step", 4, 0))
    assert outcome.died_at and outcome.worlds == 2
    jobs.assert_as_plain("killed", outcome, workers=SIZE - 1)
    outcome = jobs.run("join", death=death("training step", 3, 1), is_replaced=True)
    jobs.assert_as_plain("join", outcome, workers=SIZE)


def test_a_hook_before_a_training_step_is_repeated(lightning: Make) -> None:
    """Others are about to call the module's forward pass, in whose place Lightning has put
    training_step."""
    jobs = lightning(epochs=1)
    for event in (2, 3):
        outcome = jobs.run(f"killed-{event}", death=death("hook before it", event, 1))
        assert outcome.died_at
        jobs.assert_as_plain(f"killed-{event}", outcome, workers=SIZE - 1)


@pytest.mark.slow
def test_a_node_that_joins_after_an_epochs_last_step_reduces_what_it_has_not_logged(
    lightning: Make,
) -> None:
    jobs = lightning(metric=True, epochs=2)
    outcome = jobs.run("join", death=death("validation", 5, 1), is_replaced=True)
    assert outcome.died_at
    outcome.assert_success(workers=SIZE)


@pytest.mark.slow
def test_an_evaluation_after_fit_is_repeated(lightning: Make) -> None:
    jobs = lightning(test=True, epochs=1)
    outcome = jobs.run("killed", death=death("test", 2, 1))
    assert outcome.died_at
    jobs.assert_as_plain("killed", outcome, workers=SIZE - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "event"), [("predict", 2), ("training step", 4)])
def test_ranks_of_a_smaller_world_predict_all_samples(
    lightning: Make, place: str, event: int
) -> None:
    jobs = lightning(predict=True, epochs=1)
    died = death("prediction" if place == "predict" else place, event, 1)
    outcome = jobs.run("killed", death=died)
    outcome.assert_success(workers=SIZE - 1)
    assert outcome.died_at
    assert [int(w.result["predicted"]) for w in outcome.survivors] == [10, 10]  # of 20


TWICE: Options = {"validate": True, "fits": 2, "epochs": 1, "averaging": True}


@pytest.mark.slow
@pytest.mark.parametrize("event", [2, 6, 7, 10])
def test_a_second_fit_equals_that_of_plain_lightning(lightning: Make, event: int) -> None:
    """Which begins with new optimizers and schedules, after 5 updates."""
    jobs = lightning(**TWICE)
    outcome = jobs.run("killed", death=death("training step", event, 0))
    assert outcome.died_at
    jobs.assert_as_plain("killed", outcome, workers=SIZE - 1)
    outcome = jobs.run("join", death=death("training step", event, 1), is_replaced=True)
    jobs.assert_as_plain("join", outcome, workers=SIZE)


@pytest.mark.slow
def test_a_node_joins_after_a_death_in_a_sanity_check(lightning: Make) -> None:
    jobs = lightning(epochs=1)
    outcome = jobs.run("join", death=death("validation", 2, 1), is_replaced=True)
    assert outcome.died_at
    jobs.assert_as_plain("join", outcome, workers=SIZE)


@pytest.mark.slow
def test_a_node_joins_in_a_second_fit_without_loggers(lightning: Make) -> None:
    jobs = lightning(logger="", fits=2, epochs=1)
    outcome = jobs.run("join", death=death("training step", 7, 1), is_replaced=True)
    assert outcome.died_at
    jobs.assert_as_plain("join", outcome, workers=SIZE)


@pytest.mark.slow
def test_a_job_continues_in_a_second_fit(lightning: Make) -> None:
    jobs = lightning(checkpoints=1, **{**TWICE, "validate": False})
    assert jobs.run("job", death=death("training step", 8, 1), on_death=STOP).died_at
    jobs.assert_as_plain("job", jobs.run("job"), workers=SIZE)


@pytest.mark.slow
def test_log_entries_outlive_a_death_while_their_file_is_opened(tmp_path: Path) -> None:
    from elastic.integrations.lightning import reopen

    class CSVLogger:
        log_dir = tmp_path

        @property
        def experiment(self) -> SimpleNamespace:
            if is_killed:
                raise KeyboardInterrupt
            return SimpleNamespace(metrics_keys=[])

    (tmp_path / "metrics.csv").write_text("loss,step\n1,0\n2,1\n")
    is_killed = True
    with pytest.raises(KeyboardInterrupt):
        reopen(CSVLogger(), 2)
    is_killed = False
    reopen(CSVLogger(), 1)
    (left,) = tmp_path.iterdir()
    assert (left.name, left.read_text()) == ("metrics.csv", "loss,step\n1,0\n")


@pytest.mark.slow
def test_a_job_continues_from_its_own_checkpoint(lightning: Make) -> None:
    # Killed after a save of Lightning that is newer than the job's own: it is saved again.
    jobs = lightning(checkpoints=3, save={"every_n_train_steps": 1, "save_top_k": -1})
    killed = jobs.run("job", death=death("training step", 10, 1), on_death=STOP)
    assert killed.died_at
    again = jobs.run("job")
    again.assert_success(workers=SIZE)
    assert "state-restored source='step-" in "".join(w.log for w in again.workers)
    jobs.assert_as_plain("job", again, workers=SIZE)


@pytest.mark.slow
def test_the_other_package_of_lightning(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")
    with SmallWorld(prepare=DEVICE, imports=["pytorch_lightning", "torchmetrics"]) as other:
        options = {"package": "pytorch_lightning", "epochs": 1, "trainer": {"num_nodes": 7}}
        jobs = Lightning(other, tmp_path, options)
        outcome = jobs.run("elastic", death=death("training step", 2, 0))
        outcome.assert_success(workers=SIZE - 1)
        assert [w.steps for w in outcome.survivors] == [5, 5]


REFUSED = """
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset
from elastic.integrations import lightning as integration

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(4, 1))

def trainer():
    return pl.Trainer(strategy="elastic", accelerator="cpu", max_epochs=1, logger=False,
                      enable_progress_bar=False, enable_checkpointing=False)

def samples():
    return DataLoader(torch.ones(8, 1), batch_size=2)

what = sys.argv[1]
if what == "option":
    integration.ElasticStrategy(ddp_comm_hook=print)
elif what == "finetuning":
    other = trainer()
    other.callbacks.append(pl.callbacks.BackboneFinetuning())
    model = Model()
    model.backbone = torch.nn.Linear(1, 1)
    other.fit(model, samples())
elif what == "tuner":
    from lightning.pytorch.tuner import Tuner
    Tuner(trainer()).lr_find(Model(), samples())
elif what == "stream":
    trainer().fit(Model(), DataLoader(Stream(), batch_size=2))
elif what == "twice":
    trainer().fit(Model(), samples())
    trainer().fit(Model(), samples())
elif what == "whole batches":
    model = Model()
    model.automatic_optimization = False
    other = trainer()
    other.strategy._whole_batches = True
    other.fit(model, samples())
elif what == "phases":
    model = Model()
    trainer().fit(model, samples())
    model.configure_optimizers = lambda: torch.optim.Adam(model.parameters())
    trainer().fit(model, samples())
elif what == "sampler":
    other = pl.Trainer(strategy="elastic", accelerator="cpu", max_epochs=1, logger=False,
                       use_distributed_sampler=False, enable_progress_bar=False,
                       enable_checkpointing=False)
    other.fit(Model(), samples())
elif what == "devices":
    pl.Trainer(strategy="elastic", accelerator="cpu", devices=2, logger=False).fit(
        Model(), samples())
elif what == "other version":
    integration._NAMES["loops.fit_loop._FitLoop"]["run"] = "another parameter"
    strategy = integration._define("lightning.pytorch")()
    strategy.strategy_name
"""
REFUSALS = {  # and the number of workers
    "whole batches": (1, "whole_batches=True calls training_step for several batches"),
    "option": (1, "ElasticStrategy(ddp_comm_hook=…) is not supported"),
    "finetuning": (1, "BackboneFinetuning adds parameters to the optimizer during training"),
    "tuner": (1, "LearningRateFinder trains before the job does"),
    "stream": (1, "Stream cannot be divided among a changing number of ranks"),
    "twice": (1, "trainer.fit() is called again with another LightningModule"),
    "phases": (1, "trainer.fit() is called again with other optimizers"),
    "sampler": (2, "Trainer(use_distributed_sampler=False): each rank would read all samples"),
    "devices": (1, "Trainer(devices=2) on a node with 1 workers"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_recover_is_refused(world: SmallWorld, tmp_path: Path, what: str) -> None:
    size, message = REFUSALS[what]
    path = tmp_path / "script.py"
    path.write_text(REFUSED)
    outcome = world.run(path, tmp_path / "run", size=size, arguments=[what], is_counted=False)
    assert all(f"ConfigError: {message}" in w.error for w in outcome.workers if w.error)
    assert any(w.error for w in outcome.workers), outcome.describe()


def test_another_version_of_lightning_recovers_by_restarts(
    world: SmallWorld, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(REFUSED)
    outcome = world.run(path, tmp_path / "run", size=1, arguments=["other version"])
    outcome.assert_success(workers=1)
    assert "has no loops.fit_loop._FitLoop.run(another, parameter)" in outcome.workers[0].log
