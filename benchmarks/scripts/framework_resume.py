"""One job in the loop of a framework that resumes: framework_resume.py KIND FOLDER

KIND: ``accelerate``, ``fabric``, ``lightning``, ``transformers``, with this library, or
``plain-…``, as the framework's documentation resumes after a restart of torchrun. 480 samples in 3
epochs, batches of 8 on each of 3 ranks: 60 updates. Each process appends a line for each update to
a file in FOLDER: the wall clock, the number of the update, the epoch, and this rank's samples; and
these samples to another one before the update, for a process that is killed between both.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, EPOCHS, EVERY = 480, 8, 3, 10
STEP_S = 0.1  # as a model that is worth a cluster, so that a kill comes between two saves
KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
IS_PLAIN = KIND.startswith("plain-")
SAVED = FOLDER / "saved"


class Data(Dataset[dict[str, torch.Tensor]]):
    """Vectors that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(0, keepdim=True), "index": torch.tensor(index)}


class Net(nn.Module):
    """Returns the loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 1)
        self.read: list[int] = []  # samples of the current update
        self.steps: Steps | None = None

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        self.read = index.tolist()
        if self.steps is not None:
            self.steps.read(self.read)
        time.sleep(STEP_S)
        return {"loss": F.mse_loss(self.net(x), labels)}


class Steps:
    """Notes each update."""

    def __init__(self, net: Net) -> None:
        self._net = net
        net.steps = self
        self._file = (FOLDER / f"updates-{os.getpid()}").open("a", buffering=1)
        self._read = (FOLDER / f"read-{os.getpid()}").open("a", buffering=1)

    def read(self, samples: list[int]) -> None:
        self._read.write(",".join(map(str, samples)) + "\n")

    def note(self, update: int, epoch: int) -> None:
        samples = ",".join(map(str, self._net.read))
        self._file.write(f"{time.time()} {update} {epoch} {samples}\n")


def newest(folder: Path) -> Path | None:
    """The newest of the checkpoints, which are named by their updates."""
    complete = [path for path in folder.glob("step_*") if not path.name.endswith(".tmp")]
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def accelerate_loop() -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    net = Net()
    steps, optimizer = Steps(net), torch.optim.AdamW(net.parameters())
    loader = DataLoader(Data(), batch_size=BATCH, shuffle=True)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    if not IS_PLAIN:
        from elastic.integrations.accelerate import ElasticAccelerator

        own = ElasticAccelerator(dataloader_config=config)
        model, optimizer, loader = own.prepare(net, optimizer, loader)
        own.run.state["update"] = 0

        def train() -> None:
            for epoch in own.epochs(EPOCHS):
                for batch in loader:
                    optimizer.zero_grad()
                    own.backward(model(**batch)["loss"])
                    optimizer.step()
                    own.run.state["update"] += 1
                    steps.note(own.run.state["update"], epoch)

        own.retry(train)
        return
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    update = 0
    if (path := newest(SAVED)) is not None:
        accelerator.load_state(str(path))
        update = int(path.name.removeprefix("step_"))
    first, skipped = divmod(update, len(loader))
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        rest = loader
        if epoch == first and skipped:
            rest = accelerator.skip_first_batches(loader, skipped)
        for batch in rest:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            update += 1
            steps.note(update, epoch)
            if update % EVERY == 0:
                accelerator.save_state(str(SAVED / f"step_{update}"))


def fabric_loop() -> None:
    from lightning.fabric import Fabric

    net = Net()
    steps = Steps(net)
    fabric: Any
    if not IS_PLAIN:
        from elastic.integrations.fabric import ElasticFabric

        fabric = ElasticFabric()
        fabric.launch()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
        loader = fabric.setup_dataloaders(DataLoader(Data(), batch_size=BATCH, shuffle=True))
        fabric.elastic.state["update"] = 0

        def train() -> None:
            for epoch in fabric.epochs(EPOCHS):
                for batch in loader:
                    optimizer.zero_grad()
                    fabric.backward(model(**batch)["loss"])
                    optimizer.step()
                    fabric.elastic.state["update"] += 1
                    steps.note(fabric.elastic.state["update"], epoch)

        fabric.retry(train)
        return
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=1, num_nodes=nodes, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(Data(), batch_size=BATCH, shuffle=True))
    state = {"model": model, "optimizer": optimizer, "update": 0, "epoch": 0}
    if (path := newest(SAVED)) is not None:
        fabric.load(path, state)
    for epoch in range(state["epoch"], EPOCHS):
        state["epoch"] = epoch
        for batch in loader:
            optimizer.zero_grad()
            fabric.backward(model(**batch)["loss"])
            optimizer.step()
            state["update"] += 1
            steps.note(state["update"], epoch)
            if state["update"] % EVERY == 0:
                fabric.save(SAVED / f"step_{state['update']}", state)


def lightning_fit() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.steps = Steps(self.net)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: object) -> None:
            self.steps.note(self.global_step, self.current_epoch)

    options: dict[str, Any] = {"num_nodes": int(os.environ["GROUP_WORLD_SIZE"]), "strategy": "ddp"}
    if not IS_PLAIN:
        from elastic.integrations.lightning import ElasticStrategy

        options = {"strategy": ElasticStrategy()}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[ModelCheckpoint(SAVED, save_last=True, every_n_train_steps=EVERY)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = DataLoader(Data(), batch_size=BATCH, shuffle=True)
    trainer.fit(Module(), data, ckpt_path="last" if IS_PLAIN else None)


def transformers_train() -> None:
    trainer_class: Any
    if IS_PLAIN:
        from transformers import Trainer

        trainer_class = Trainer
    else:
        from elastic.integrations.transformers import ElasticTrainer

        trainer_class = ElasticTrainer
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    net = Net()
    steps = Steps(net)

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            steps.note(state.global_step, int((state.global_step - 1) * EPOCHS / state.max_steps))

    arguments = TrainingArguments(
        output_dir=str(SAVED),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        save_steps=EVERY,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = trainer_class(model=net, args=arguments, train_dataset=Data(), callbacks=[Noting()])
    last = get_last_checkpoint(str(SAVED)) if IS_PLAIN and SAVED.is_dir() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    {
        "accelerate": accelerate_loop,
        "fabric": fabric_loop,
        "lightning": lightning_fit,
        "transformers": transformers_train,
    }[KIND.removeprefix("plain-")]()
