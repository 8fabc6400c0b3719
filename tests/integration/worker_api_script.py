"""A training script as users write them, small enough to verify every step externally.

Float64 and Adam: any difference between two runs was lost, repeated or weighted wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import checkpoints
import elastic

SAMPLES = 52


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def optimizer_for(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def weights_of(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=10)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--every-steps", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument(
        "--die",
        type=Path,
        help="a file with 'rank step': SIGKILL there, once; 'rank step saved': with a checkpoint",
    )
    parser.add_argument("--raise-on-rank", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    run = elastic.join(
        checkpoints=elastic.Checkpoints(folder=args.checkpoints, when=args.every_steps)
        if args.checkpoints
        else None
    )
    # Ranks start with different weights on purpose: all must adopt rank 0's.
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model = run.wrap(network())
    optimizer = optimizer_for(model, args.optimizer)
    run.track(optimizer=optimizer)
    loader = run.loader(
        DataLoader(dataset(), batch_size=10, shuffle=True),
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
    )
    test_loader = run.shard(DataLoader(dataset(), batch_size=5))

    def die_if_told(step: int) -> None:
        if args.die and args.die.exists():
            rank, at, *once_saved = args.die.read_text().split()
            if (run.world.rank, step) == (int(rank), int(at)):
                while once_saved and not checkpoints.list_checkpoints(args.checkpoints):
                    time.sleep(0.01)
                args.die.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for _ in run.epochs(args.epochs):
            for step in run.steps(loader):
                optimizer.zero_grad()
                for x, y in step:
                    loss = F.mse_loss(model(x), y)
                    if args.micro_batch:
                        step.backward(loss)
                    else:
                        loss.backward()  # type: ignore[no-untyped-call]
                die_if_told(step.number)
                if args.raise_on_rank == run.world.rank:
                    raise ValueError("a mistake of the user")
                optimizer.step()

    run.retry(train)
    seen, error = 0, 0.0
    model.eval()
    for x, y in test_loader:
        error += float(F.mse_loss(model(x), y, reduction="sum").detach())
        seen += len(x)
    result = run.mean(seen, mse=error / max(seen, 1), ranks=run.world.size)
    if run.is_main:
        args.out.write_text(json.dumps({**result, "weights": weights_of(model)}))


if __name__ == "__main__":
    main()
