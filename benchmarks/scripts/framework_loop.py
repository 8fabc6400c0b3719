"""One model in the loop of a framework: framework_loop.py KIND FOLDER EPOCHS

KIND: ``loop``, ``accelerate``, ``fabric``, ``lightning``, ``transformers``, with this library, or
``plain-…``, without. Each process appends a line for each update to a file in FOLDER: the wall
clock, and how many updates it has seen.
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

SAMPLES, BATCH, WIDTH = 3072, 32, 1024
KIND, FOLDER, EPOCHS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
IS_PLAIN = KIND.startswith("plain-")
FRAMEWORK = KIND.removeprefix("plain-")


class Data(Dataset[dict[str, torch.Tensor]]):
    """Random vectors; the target is the vector shifted by one."""

    def __init__(self) -> None:
        self._x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = self._x[index]
        return {"x": x, "labels": x.roll(1, 0)}


class Net(nn.Module):
    """Two million parameters. Returns the loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.net(x), labels)}


class Steps:
    """Notes each update."""

    def __init__(self) -> None:
        self._file = (FOLDER / f"steps-{os.getpid()}").open("a", buffering=1)
        self._count = 0

    def note(self) -> None:
        self._count += 1
        self._file.write(f"{time.time()} {self._count}\n")


def own_loop(steps: Steps) -> None:
    import elastic

    run = elastic.join()
    model = run.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(optimizer=optimizer)
    loader = run.loader(DataLoader(Data(), batch_size=BATCH, shuffle=True))

    def train() -> None:
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                model(**batch)["loss"].backward()
                optimizer.step()
                steps.note()

    run.retry(train)


def accelerate_loop(steps: Steps) -> None:
    import accelerate

    run: Any = None
    if IS_PLAIN:
        accelerator = accelerate.Accelerator(cpu=True)
    else:
        from elastic.integrations.accelerate import ElasticAccelerator

        accelerator = ElasticAccelerator()
        run = accelerator.run
    model: Any = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Data(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train() -> None:
        for _ in range(EPOCHS) if IS_PLAIN else run.epochs(EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                steps.note()

    train() if IS_PLAIN else run.retry(train)


def fabric_loop(steps: Steps) -> None:
    from lightning.fabric import Fabric

    run: Any = None
    if IS_PLAIN:
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        fabric = Fabric(accelerator="cpu", devices=1, num_nodes=nodes, strategy="ddp")
    else:
        from elastic.integrations.fabric import ElasticFabric

        fabric = ElasticFabric()
        run = fabric.elastic
    fabric.launch()
    model: Any = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(Data(), batch_size=BATCH, shuffle=True))

    def train() -> None:
        for _ in range(EPOCHS) if IS_PLAIN else run.epochs(EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                fabric.backward(model(**batch)["loss"])
                optimizer.step()
                steps.note()

    train() if IS_PLAIN else run.retry(train)


def lightning_fit(steps: Steps) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: object) -> None:
            steps.note()

    options: dict[str, Any] = {"num_nodes": int(os.environ["GROUP_WORLD_SIZE"]), "strategy": "ddp"}
    if not IS_PLAIN:
        from elastic.integrations.lightning import ElasticStrategy

        options = {"strategy": ElasticStrategy()}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Module(), DataLoader(Data(), batch_size=BATCH, shuffle=True))


def transformers_train(steps: Steps) -> None:
    trainer_class: Any
    if IS_PLAIN:
        from transformers import Trainer

        trainer_class = Trainer
    else:
        from elastic.integrations.transformers import ElasticTrainer

        trainer_class = ElasticTrainer
    from transformers import TrainerCallback, TrainingArguments

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            steps.note()

    arguments = TrainingArguments(
        output_dir=str(FOLDER / "output"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        save_strategy="no",
        logging_steps=1000,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer_class(model=Net(), args=arguments, train_dataset=Data(), callbacks=[Noting()]).train()


if __name__ == "__main__":
    {
        "loop": own_loop,
        "accelerate": accelerate_loop,
        "fabric": fabric_loop,
        "lightning": lightning_fit,
        "transformers": transformers_train,
    }[FRAMEWORK](Steps())
