"""A loop with Accelerate: plain|elastic ACCUMULATION WORKERS SPLIT [tokens [first]] [counts]

tokens: the loss is a mean over them. first: gradients are set to zero before the forward pass.
counts: by enumerate, as in Accelerate's nlp_example, which begins each epoch with a group of one.
"""

import os
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import GradientAccumulationPlugin
from kit.plain_store import fork_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.integrations.accelerate import ElasticAccelerator

kind, accumulation, workers, split = sys.argv[1], *map(int, sys.argv[2:5])
has_tokens = "tokens" in sys.argv
rank = fork_ranks(3) if kind == "plain" else 0
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
inputs = torch.randn(96, 4)
targets = inputs.sin().sum(1, keepdim=True)
data = TensorDataset(inputs, targets)
options = {
    "dataloader_config": DataLoaderConfiguration(
        use_seedable_sampler=True, split_batches=bool(split)
    ),
    "gradient_accumulation_plugin": GradientAccumulationPlugin(
        num_steps=1 if "counts" in sys.argv else accumulation
    ),
    "cpu": os.environ.get("SHARED_GPU") != "1",
}
if kind == "plain":
    PartialState(cpu=options["cpu"])
else:
    run = elastic.join(checkpoints=os.environ.get("FOLDER"))
    options["whole_batches"] = has_tokens


class Tracker(GeneralTracker):
    """Opens on the main process, as trackers of files and of services do."""

    name, requires_logging_directory, tracker = "own", False, None

    @on_main_process
    def __init__(self) -> None:
        super().__init__()
        self.epochs = []

    @on_main_process
    def store_init_configuration(self, values):
        self.configured = values

    @on_main_process
    def log(self, values, step=None):
        self.epochs.append(step)


tracker = Tracker()
options["log_with"] = tracker
plain = kind == "plain"
accelerator = Accelerator(**options) if plain else ElasticAccelerator(run=run, **options)


class Best:
    """A counter of the script's own."""

    def __init__(self) -> None:
        self.loss, self.epoch = float("inf"), -1

    def state_dict(self):
        return {"loss": self.loss, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.loss, self.epoch = state["loss"], state["epoch"]


model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
size = 12 if split else 4
train_loader = DataLoader(data, batch_size=size, shuffle=True, num_workers=workers)
eval_loader = DataLoader(TensorDataset(inputs[:50], targets[:50]), batch_size=size)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.05, total_steps=24 if split else 72
)
best = Best()
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
accelerator.register_for_checkpointing(best)
accelerator.init_trackers("loop", {"accumulation": accumulation})


def evaluate() -> float:
    model.eval()
    total = torch.zeros((), device=accelerator.device)
    samples = 0
    for x, y in eval_loader:
        with torch.no_grad():
            predictions = model(x)
        predictions, y = accelerator.gather_for_metrics((predictions, y))
        total += ((predictions - y) ** 2).sum()
        samples += len(y)
    assert samples == 50, samples
    return float(total) / samples


def loss_of(x, y):
    errors = (model(x) - y) ** 2
    if not has_tokens:
        return errors.mean()
    tokens = (4 * x.abs().sum(1, keepdim=True)).ceil()  # of each sample
    return (tokens * errors).sum() / tokens.sum()


def train_as_accumulation_does_not(x, y):
    optimizer.zero_grad()
    accelerator.backward(loss_of(x, y))
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()


def train_as_nlp_example_does():
    for step, (x, y) in enumerate(train_loader):
        accelerator.backward(loss_of(x, y) / accumulation)
        if step % accumulation == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def train() -> None:
    for epoch in range(3) if kind == "plain" else run.epochs(3):
        model.train()
        if "counts" in sys.argv:
            train_as_nlp_example_does()
        for x, y in () if "counts" in sys.argv else train_loader:
            if "first" in sys.argv:
                train_as_accumulation_does_not(x, y)
                continue
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(x, y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss = evaluate()
        if loss < best.loss:
            best.loss, best.epoch = loss, epoch
        accelerator.log({"loss": loss}, step=epoch)


if kind == "plain":
    train()
else:
    run.retry(train)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    assert tracker.epochs[-1] == 2, tracker.epochs
    assert tracker.configured == {"accumulation": accumulation}
result = dict(accelerator.unwrap_model(model).state_dict())
result["best"] = torch.tensor([best.loss, float(best.epoch)])
result["rate"] = torch.tensor(scheduler.get_last_lr())
if rank:
    os._exit(0)
