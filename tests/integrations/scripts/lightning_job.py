"""A job of Lightning: job_places.py says what it is for."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from job_places import ACCUMULATE, BATCH, EPOCHS, FOLDER, WORKERS, data, leave, trains, wait_at
from job_places import training_data as samples_for
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from elastic.integrations.lightning import ElasticStrategy


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

    def wait_at(self, place):
        wait_at(place, epoch=self.trainer.current_epoch, rank=self.trainer.global_rank)

    def training_step(self, batch, batch_idx):
        trains(epoch=self.trainer.current_epoch)
        if batch_idx == 3:
            self.wait_at("train")
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.wait_at("validation")
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        self.wait_at("save")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


strategy = ElasticStrategy(checkpoints=FOLDER / "checkpoints", when=5)
record = Record()
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=1,
    max_epochs=EPOCHS,
    accumulate_grad_batches=ACCUMULATE,
    callbacks=[record, ModelCheckpoint(FOLDER / "saved", monitor="val_loss", save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
training_data = samples_for(strategy.run.largest_world)
trainer.fit(
    module,
    DataLoader(training_data, BATCH, shuffle=True, num_workers=WORKERS),
    DataLoader(data(20), BATCH),
)
leave(module, steps=trainer.global_step, validations=record.validations)
