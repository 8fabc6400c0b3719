"""A job with a loop of Accelerate's or Fabric's: job_places.py says what it is for."""

import torch
import torch.nn.functional as F
from job_places import (
    ACCUMULATE,
    BATCH,
    EPOCHS,
    FOLDER,
    OPTIONS,
    STEPS,
    WORKERS,
    data,
    leave,
    trains,
    wait_at,
)
from job_places import training_data as samples_for
from torch.utils.data import DataLoader

import elastic

run = elastic.join(checkpoints=FOLDER / "checkpoints", when=5)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
loaders = (
    DataLoader(samples_for(run.largest_world), BATCH, shuffle=True, num_workers=WORKERS),
    DataLoader(data(20), BATCH),
)
if OPTIONS["framework"] == "accelerate":
    from elastic.integrations.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator(run=run, gradient_accumulation_steps=ACCUMULATE)
    model, stepped, loader, held_out = accelerator.prepare(net, optimizer, *loaders)
else:
    from elastic.integrations.fabric import ElasticFabric

    fabric = ElasticFabric(run=run, accelerator="cpu")
    fabric.launch()
    model, stepped = fabric.setup(net, optimizer)
    loader, held_out = fabric.setup_dataloaders(*loaders)


def train_batch(index, x, y):
    if OPTIONS["framework"] == "accelerate":
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            stepped.step()
            stepped.zero_grad()
        return
    is_accumulating = (index + 1) % ACCUMULATE != 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        fabric.backward(F.mse_loss(model(x), y) / ACCUMULATE)
    if not is_accumulating:
        stepped.step()
        stepped.zero_grad()


def evaluate(epoch):
    model.eval()
    with torch.no_grad():
        for x, y in held_out:
            wait_at("validation", epoch=epoch, rank=run.world.rank)
            F.mse_loss(model(x), y)
    run.state.setdefault("validations", []).append(STEPS * (epoch + 1))


def save(epoch):
    (FOLDER / "saved").mkdir(exist_ok=True)
    path = FOLDER / "saved" / f"epoch={epoch}-step={STEPS * (epoch + 1)}.ckpt"
    wait_at("save", epoch=epoch, rank=run.world.rank)
    if OPTIONS["framework"] == "accelerate":
        accelerator.save(net.state_dict(), path)
    else:
        fabric.save(path, {"model": model})


def train():
    for epoch in run.epochs(EPOCHS):
        model.train()
        for index, (x, y) in enumerate(loader, start=loader.index):
            trains(epoch=epoch)
            if index == 3:
                wait_at("train", epoch=epoch, rank=run.world.rank)
            train_batch(index, x, y)
        run.once("evaluate", evaluate, epoch)
        run.once("save", save, epoch)


run.retry(train)
steps = int(optimizer.state_dict()["state"][0]["step"])
leave(net, steps=steps, validations=list(run.state["validations"]))
