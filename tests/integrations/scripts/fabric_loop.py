"""A loop with Fabric: fabric_loop.py plain|elastic ACCUMULATION WORKERS [tokens]"""

import inspect
import os
import sys

import torch
from kit.plain_store import fork_ranks
from lightning import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.integrations.fabric import ElasticFabric

kind, accumulation, workers = sys.argv[1], *map(int, sys.argv[2:4])
has_tokens = "tokens" in sys.argv  # the loss is a mean over them
rank = fork_ranks(3) if kind == "plain" else 0
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
inputs = torch.randn(96, 4)
targets = inputs.sin().sum(1, keepdim=True)
data = TensorDataset(inputs, targets)
accelerator = "gpu" if os.environ.get("SHARED_GPU") == "1" else "cpu"


if kind == "plain":
    fabric = Fabric(
        accelerator=accelerator,
        devices=1,
        num_nodes=3,
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
    )
else:
    run = elastic.join(checkpoints=os.environ.get("FOLDER"))
    fabric = ElasticFabric(run=run, accelerator=accelerator, whole_batches=has_tokens)
fabric.launch()
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
if "scheduler" in inspect.signature(fabric.setup).parameters:
    model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
else:  # before Lightning 2.6
    model, optimizer = fabric.setup(model, optimizer)
    if kind == "elastic":
        run.track(scheduler=scheduler)
train_loader, eval_loader = fabric.setup_dataloaders(
    DataLoader(data, batch_size=4, shuffle=True, num_workers=workers),
    DataLoader(TensorDataset(inputs[:48], targets[:48]), batch_size=4),
)


def evaluate() -> float:
    model.eval()
    total = torch.zeros((), device=fabric.device)
    with torch.no_grad():
        for x, y in eval_loader:
            total += ((model(x) - y) ** 2).sum()
    return float(fabric.all_reduce(total, reduce_op="sum")) / 48


def loss_of(x, y):
    errors = (model(x) - y) ** 2
    if not has_tokens:
        return errors.mean()
    tokens = (4 * x.abs().sum(1, keepdim=True)).ceil()  # of each sample
    return (tokens * errors).sum() / tokens.sum()


def train() -> None:
    for _ in range(3) if kind == "plain" else run.epochs(3):
        model.train()
        for index, batch in enumerate(train_loader):
            is_accumulating = (index + 1) % accumulation != 0
            for x, y in batch if has_tokens and kind != "plain" else [batch]:
                with fabric.no_backward_sync(model, enabled=is_accumulating):
                    fabric.backward(loss_of(x, y) / accumulation)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        losses.append(evaluate())


losses: list[float] = []
if kind == "plain":
    train()
else:
    run.retry(train)
result = dict(model.module.state_dict())
result["loss"] = torch.tensor(losses[-1])
result["rate"] = torch.tensor(scheduler.get_last_lr())
if rank:
    os._exit(0)
