"""A Lightning script in which rank 0 waits once at a place, for a fault."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic.integrations.lightning import ElasticStrategy

OPTIONS = {"place": "train", "accumulate": 1, "workers": 0, "all": 0, **json.loads(sys.argv[1])}
FOLDER = Path(OPTIONS["folder"])
BATCH, STEPS = 2, 12


def wait_at(place, trainer):
    """Wait for the test, in the second epoch."""
    if place != OPTIONS["place"] or trainer.current_epoch != 1 or trainer.global_rank != 0:
        return
    (FOLDER / f"at-{place}").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)


class Record(pl.Callback):
    def __init__(self):
        self.validations = []

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        (FOLDER / f"trained-{os.getpid()}").touch()
        if self.trainer.current_epoch == 2 and len(list(FOLDER.glob("trained-*"))) < OPTIONS["all"]:
            time.sleep(2)  # until a process that starts has joined
        if batch_idx == 3:
            wait_at("train", self.trainer)
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        wait_at("validation", self.trainer)
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        wait_at("save", self.trainer)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data(samples):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


strategy = ElasticStrategy(checkpoints=FOLDER / "checkpoints", when=5)
ranks = strategy.run.largest_world
record = Record()
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=1,
    max_epochs=3,
    accumulate_grad_batches=OPTIONS["accumulate"],
    callbacks=[record, ModelCheckpoint(FOLDER / "saved", monitor="val_loss", save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
samples = STEPS * ranks * BATCH * OPTIONS["accumulate"]
trainer.fit(
    module,
    DataLoader(data(samples), BATCH, shuffle=True, num_workers=OPTIONS["workers"]),
    DataLoader(data(20), BATCH),
)
weights = torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().tobytes()
result = {
    "global_step": trainer.global_step,
    "validations": record.validations,
    "weights": hashlib.sha256(weights).hexdigest(),
}
(FOLDER / f"result-{os.getpid()}.json").write_text(json.dumps(result))
