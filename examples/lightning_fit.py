"""A Lightning script that survives the loss of nodes. Without torchrun it trains alone ::

    elastic run --embedded-etcd --nodes-local 2 --nnodes 1:2 examples/lightning_fit.py

Kill one of the workers: the other one continues, and the weights at the end are the same.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic.integrations.lightning import ElasticStrategy


def moons(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 2
    angles = torch.rand(samples, generator=generator) * torch.pi
    x = torch.stack([angles.cos(), angles.sin()], 1)
    x = torch.where(labels[:, None] == 1, torch.tensor([1.0, 0.5]) - x, x)
    return TensorDataset(x + 0.1 * torch.randn(samples, 2, generator=generator), labels)


class Moons(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(moons(2000, seed=1), batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(moons(400, seed=2), batch_size=50)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="lightning-fit")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    pl.seed_everything(0)
    best = ModelCheckpoint(f"{options.folder}/best", monitor="val_loss", save_top_k=2)
    trainer = pl.Trainer(
        strategy=ElasticStrategy(checkpoints=f"{options.folder}/job"),
        devices=1,
        max_epochs=options.epochs,
        callbacks=[best, LearningRateMonitor()],
        logger=CSVLogger(options.folder),
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    model = Classifier()
    trainer.fit(model, datamodule=Moons())
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["val_accuracy"]
        print(f"{trainer.global_step} steps, accuracy {accuracy:.3f}, best {best.best_model_path}")


if __name__ == "__main__":
    main()
