"""A classifier as users of Lightning write it. The argument is a JSON object of options.

With ``"strategy": "ddp"`` the script forks the other ranks itself and trains with plain Lightning.
"""

import json
import os
import sys

import torch
import torch.nn.functional as F
import torchmetrics
from kit.plain_store import fork_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GIVEN = json.loads(sys.argv[1])
OPTIONS = {
    "package": "lightning",
    "strategy": "elastic",
    "ranks": 3,
    "folder": "",
    "samples": 50,
    "batch": 4,
    "epochs": 3,
    "workers": 0,
    "trainer": {},
    "scheduler": "step",
    "loaders": 1,
    "manual": False,
    "patience": 0,
    "save": {},
    "logger": "csv",
    "ema": False,
    "test": False,
    "validate": False,  # before fit
    "fits": 1,
    "predict": False,
    "checkpoints": 0,  # steps between two of the job's own
    "averaging": False,
    "gan": False,
    "tokens": False,  # the loss is a mean over them
    "accumulates": 1,  # batches, in manual optimization
    "metric": False,  # of torchmetrics, in training
    "sampler": False,  # the script's own DistributedSampler
    **GIVEN,
}


PLAIN_RANK = 0
if OPTIONS["strategy"] == "ddp":
    os.environ.update(OPTIONS["environment"])
    PLAIN_RANK = fork_ranks(OPTIONS["ranks"])

if OPTIONS["package"] == "lightning":
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
else:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

if OPTIONS["strategy"] != "ddp":
    import elastic.integrations.lightning  # registers strategy="elastic"

LOGGERS = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
torch.set_default_dtype(torch.float64)


def data(seed, samples):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x.sin().sum(1) > 0).long())


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        if OPTIONS["sampler"]:
            samples = data(1, OPTIONS["samples"])
            return DataLoader(samples, OPTIONS["batch"], sampler=DistributedSampler(samples))
        loaders = [
            DataLoader(
                data(1 + i, OPTIONS["samples"] // (1 + i)),
                batch_size=OPTIONS["batch"],
                shuffle=True,
                num_workers=OPTIONS["workers"],
            )
            for i in range(OPTIONS["loaders"])
        ]
        return loaders[0] if len(loaders) == 1 else loaders

    def test_dataloader(self):
        return DataLoader(data(9, 20), batch_size=OPTIONS["batch"])

    def predict_dataloader(self):
        return DataLoader(data(8, 20), batch_size=OPTIONS["batch"])

    def val_dataloader(self):
        return DataLoader(data(9, 20), batch_size=OPTIONS["batch"])


class Ema(pl.Callback):
    def on_fit_start(self, trainer, module):
        self.weights = {n: p.detach().clone() for n, p in module.named_parameters()}
        self.updates = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop._should_accumulate():
            return
        self.updates += 1
        for name, p in module.named_parameters():
            self.weights[name].lerp_(p.detach(), 0.1)


class Recorder(pl.Callback):
    """What plain Lightning and ours must have in common, as rank 0 sees it."""

    def __init__(self):
        self.validations, self.rates, self.outputs = [], [], []

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        maybe_die("hook", module)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.outputs = []
        self.save_hyperparameters({"width": 8})
        if OPTIONS["metric"]:
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.automatic_optimization = not OPTIONS["manual"]

    def forward(self, x):
        return self.net(x)

    def loss_of(self, x, y):
        if not OPTIONS["tokens"]:
            return F.cross_entropy(self(x), y)
        tokens = (4 * x.abs().sum(1)).ceil()  # of each sample
        return (tokens * F.cross_entropy(self(x), y, reduction="none")).sum() / tokens.sum()

    def training_step(self, batch, batch_idx):
        batches = [batch] if OPTIONS["loaders"] == 1 else batch
        loss = sum(self.loss_of(x, y) for x, y in batches)
        maybe_die("train", self)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if OPTIONS["gan"]:
            parts = zip(self.optimizers(), (self.net[0], self.net[2]), strict=True)
            for optimizer, _ in parts:
                self.toggle_optimizer(optimizer)
                loss = sum(F.cross_entropy(self(x), y) for x, y in batches)
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
            return None
        if OPTIONS["manual"]:
            optimizer = self.optimizers()
            self.manual_backward(loss / OPTIONS["accumulates"])
            self.log("late_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            if (batch_idx + 1) % OPTIONS["accumulates"] == 0:
                optimizer.step()
                optimizer.zero_grad()
            return None
        if OPTIONS["metric"]:
            x, y = batches[0]
            self.accuracy(self(x), y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log("most", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        maybe_die("validate", self)
        self.outputs.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        maybe_die("test", self)
        self.log("test_loss", loss, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        maybe_die("predict", self)
        return self(batch[0])

    def on_validation_epoch_end(self):
        self.log("outputs", float(len(self.outputs)), sync_dist=True)
        self.outputs.clear()

    def on_save_checkpoint(self, checkpoint):
        maybe_die("save", self)

    def configure_optimizers(self):
        if OPTIONS["gan"]:
            return [torch.optim.AdamW(self.net[i].parameters(), lr=0.05) for i in (0, 2)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if not OPTIONS["scheduler"]:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
        if OPTIONS["scheduler"] == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]
        return [optimizer], [{"scheduler": scheduler, "interval": OPTIONS["scheduler"]}]


def maybe_die(place, module):
    """Mark places for deaths: lines of this script."""
    if place == "train":
        pass  # died in a training step
    elif place == "hook":
        pass  # died in a hook before it
    elif place == "validate":
        pass  # died in a validation
    elif place == "save":
        pass  # died in a save
    elif place == "test":
        pass  # died in a test
    elif place == "predict":
        pass  # died in a prediction


def strategy():
    if OPTIONS["checkpoints"] and OPTIONS["strategy"] != "ddp":
        return elastic.integrations.lightning.ElasticStrategy(
            checkpoints=f"{OPTIONS['folder']}/job", when=OPTIONS["checkpoints"]
        )
    if OPTIONS["tokens"] and OPTIONS["strategy"] != "ddp":
        return elastic.integrations.lightning.ElasticStrategy(whole_batches=True)
    if not OPTIONS["gan"]:
        return OPTIONS["strategy"]
    if OPTIONS["strategy"] == "ddp":
        return "ddp_find_unused_parameters_true"
    return elastic.integrations.lightning.ElasticStrategy(find_unused_parameters=True)


torch.manual_seed(3)
folder = OPTIONS["folder"]
recorder = Recorder()
checkpoint = ModelCheckpoint(
    **{
        "dirpath": f"{folder}/saved",
        "monitor": "val_loss",
        "save_top_k": 2,
        "save_last": True,
        **OPTIONS["save"],
    }
)
callbacks = [recorder, checkpoint]
if OPTIONS["logger"]:
    callbacks.append(LearningRateMonitor())
if OPTIONS["patience"]:
    callbacks.append(EarlyStopping("val_loss", patience=OPTIONS["patience"]))
if OPTIONS["ema"]:
    callbacks.append(Ema())
if OPTIONS["averaging"]:
    callbacks.append(pl.callbacks.WeightAveraging())
trainer = pl.Trainer(
    **{
        "accelerator": "gpu" if os.environ.get("SHARED_GPU") == "1" else "cpu",
        "devices": 1,
        "num_nodes": OPTIONS["ranks"],
        "max_epochs": OPTIONS["epochs"],
        "strategy": strategy(),
        "callbacks": callbacks,
        "logger": LOGGERS[OPTIONS["logger"]](folder) if OPTIONS["logger"] else False,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **OPTIONS["trainer"],
    }
)
module = Classifier()
before = {}
if OPTIONS["validate"]:
    (before,) = trainer.validate(module, datamodule=Data(), verbose=False)
    before = {f"before {name}": value for name, value in before.items()}
trainer.fit(module, datamodule=Data())
for _ in range(1, OPTIONS["fits"]):
    trainer.fit_loop.max_epochs += OPTIONS["epochs"]
    trainer.fit(module, datamodule=Data())
    trainer.save_checkpoint(f"{folder}/saved/fit.ckpt")

result = {
    **module.state_dict(),
    **before,
    "global_step": trainer.global_step,
    "epoch": trainer.current_epoch,
    "validations": torch.tensor(recorder.validations),
    "rates": torch.tensor(recorder.rates),
    "best": torch.as_tensor(checkpoint.best_model_score),
    "val_loss": trainer.callback_metrics["val_loss"],
    "train_loss": trainer.callback_metrics["train_loss_epoch"],
}
if OPTIONS["ema"]:
    result |= {f"ema {n}": w for n, w in callbacks[-1].weights.items()}
    result["ema updates"] = callbacks[-1].updates
if OPTIONS["test"]:
    (tested,) = trainer.test(module, datamodule=Data(), verbose=False)
    result |= tested
if OPTIONS["predict"]:
    result["predicted"] = sum(len(each) for each in trainer.predict(module, datamodule=Data()))
if PLAIN_RANK:
    os._exit(0)
