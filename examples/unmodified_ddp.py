"""A plain DistributedDataParallel script without any use of elastic.

    torchrun --nproc-per-node=2 examples/unmodified_ddp.py --checkpoint /tmp/ddp.pt

It saves a checkpoint once per epoch and resumes at that epoch: under torchrun with the etcd
backend, a change of the world costs the current epoch. Rank 0 prints one JSON line.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Busy(TensorDataset):
    """A dataset whose workers are always computing, as with heavy augmentation."""

    def __init__(self, *tensors: torch.Tensor, busy_ms: float) -> None:
        super().__init__(*tensors)
        self.busy_ms = busy_ms

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        end = time.monotonic() + self.busy_ms / 1000
        while time.monotonic() < end:
            pass
        return super().__getitem__(index)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--checkpoint", help="file; none: every start is from epoch 0")
parser.add_argument("--workers", type=int, default=0, help="data workers per rank")
parser.add_argument("--busy-ms", type=float, default=0, help="computing per sample and data worker")
parser.add_argument("--step-delay-ms", type=float, default=0, help="slows steps down")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
digits = load_digits()
data = Busy(
    torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16,
    torch.tensor(digits.target),
    busy_ms=args.busy_ms,
)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

first_epoch = 0
if args.checkpoint and os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first_epoch = saved["epoch"]

for epoch in range(first_epoch, args.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        time.sleep(args.step_delay_ms / 1000)
    dist.all_reduce(total)
    if rank == 0:
        mean = float(total) / (len(loader) * dist.get_world_size())
        line = {"epoch": epoch, "loss": mean, "world_size": dist.get_world_size()}
        print(json.dumps(line), flush=True)
        if args.checkpoint:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "epoch": epoch + 1}, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)

if rank == 0:
    print(json.dumps({"done": True, "epochs": args.epochs}), flush=True)
dist.destroy_process_group()
