"""Trains a small CNN on scikit-learn's digits: 1,797 real images, seconds on a CPU.

    python examples/digits.py
    torchrun --nproc-per-node=2 examples/digits.py --checkpoints /tmp/digits

Kill it at any point and start it again, with any number of workers: it resumes from the
newest checkpoint, and every image still counts once per epoch. Rank 0 prints one JSON line.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--global-batch", type=int, default=96, help="samples of one step of the whole job"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoints", help="folder; default: ELASTIC_CHECKPOINTS, else none")
    parser.add_argument("--every-steps", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument(
        "--step-delay-ms", type=float, default=0, help="slows steps down, to aim at one"
    )
    parser.add_argument(
        "--step-delay-file", help="file with such a number, for a delay that changes on the way"
    )
    return parser.parse_args()


def step_delay_s() -> float:
    delay_ms = args.step_delay_ms
    if args.step_delay_file:
        delay_ms = float(Path(args.step_delay_file).read_text())
    return delay_ms / 1000


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """About 80 % to train on, 20 % to test on; the same split everywhere."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


args = arguments()
folder = args.checkpoints
run = elastic.join(
    checkpoints=elastic.Checkpoints(folder=folder, when=args.every_steps) if folder else None
)
torch.manual_seed(0)
train_set, test_set = datasets()
model = run.wrap(Net().to(run.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
run.track(optimizer=optimizer, scheduler=scheduler)
train_loader = run.loader(
    DataLoader(train_set, batch_size=32, shuffle=True), global_batch=args.global_batch
)
test_loader = run.shard(DataLoader(test_set, batch_size=360))


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    right = seen = 0
    for x, y in test_loader:
        right += int((model(x.to(run.device)).argmax(1).cpu() == y).sum())
        seen += len(y)
    model.train()
    return run.mean(seen, accuracy=right / max(seen, 1))["accuracy"]


def train() -> None:
    for _ in run.epochs(args.epochs):
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(run.device)), y.to(run.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            time.sleep(step_delay_s())
        scheduler.step()
        run.state["accuracy"] = accuracy()


run.retry(train)
if run.is_main:
    print(json.dumps({"accuracy": run.state["accuracy"], "world_size": run.world.size}))
