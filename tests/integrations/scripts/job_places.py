"""What the scripts of real jobs have in common: rank 0 waits once at a place, for a fault.

The argument is a JSON object: the folder, ``place`` (train, validation, save), ``accumulate``,
``workers`` of the loader, and ``all``, the number of processes that the test starts.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

OPTIONS = {"place": "train", "accumulate": 1, "workers": 0, "all": 0, **json.loads(sys.argv[1])}
FOLDER = Path(OPTIONS["folder"])
ACCUMULATE, WORKERS = OPTIONS["accumulate"], OPTIONS["workers"]
BATCH, STEPS, EPOCHS = 2, 12, 3


def wait_at(place: str, *, epoch: int, rank: int) -> None:
    """Wait for the test, in the second epoch."""
    if place != OPTIONS["place"] or epoch != 1 or rank != 0:
        return
    (FOLDER / f"at-{place}").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)


def trains(*, epoch: int) -> None:
    """Called in each batch: in the last epoch, a process that starts gets time to join."""
    (FOLDER / f"trained-{os.getpid()}").touch()
    if epoch == EPOCHS - 1 and len(list(FOLDER.glob("trained-*"))) < OPTIONS["all"]:
        time.sleep(2)


def training_data(ranks: int) -> TensorDataset:
    """Samples for so many steps of all ranks of the largest world."""
    return data(STEPS * ranks * BATCH * ACCUMULATE)


def data(samples: int) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def leave(module: torch.nn.Module, *, steps: int, validations: list[int]) -> None:
    """Write what this process has trained."""
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().tobytes()
    result = {
        "global_step": steps,
        "validations": validations,
        "weights": hashlib.sha256(weights).hexdigest(),
    }
    (FOLDER / f"result-{os.getpid()}.json").write_text(json.dumps(result))
