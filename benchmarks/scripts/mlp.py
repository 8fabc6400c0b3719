"""A multilayer perceptron of a million parameters, in steps of about 20 ms: ours, or plain DDP.

Prints one JSON line at the end of a plain or timed run: seconds of wall and of CPU per step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES, BATCH, WARM_UP = 6144, 48, 30
# With data workers an epoch lasts 40 s: torch starts them anew for each, which would look like a
# pause. Reading a sample takes so long that two workers a rank are busy most of the time.
REPEATS, READ_S = 16, 0.002


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))  # 1.05 million


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 512, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.roll(1, 1))


class Slow(TensorDataset):
    """Data that keeps its readers busy."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(READ_S)
        return tuple(tensor[index % SAMPLES] for tensor in self.tensors)

    def __len__(self) -> int:
        return SAMPLES * REPEATS


class Meter:
    """Times the steps after the warm-up."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.count = 0
        self.began = (0.0, 0.0)

    def step(self, step_s: float) -> bool:
        """After each step; True when it was the last."""
        time.sleep(step_s)
        self.count += 1
        if self.count == WARM_UP:
            self.began = time.perf_counter(), time.process_time()
        return self.steps > 0 and self.count >= self.steps + WARM_UP

    def report(self) -> None:
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        print(json.dumps({"wall_s": wall / self.steps, "cpu_s": cpu / self.steps}), flush=True)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train_plain(meter: Meter, options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    rows = data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(rows)
    size = BATCH // dist.get_world_size()
    loader = DataLoader(rows, batch_size=size, sampler=sampler, drop_last=True)

    def forever() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for epoch in range(10_000):
            sampler.set_epoch(epoch)
            yield from loader

    for x, y in forever():
        update(model, optimizer, x, y)
        if meter.step(options.step_s):
            break
    if dist.get_rank() == 0:
        meter.report()
    dist.destroy_process_group()


def train_elastic(meter: Meter, options: argparse.Namespace) -> None:
    import elastic

    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from kit.shared_gpu import share_if_told

    share_if_told()
    run = elastic.join()
    model = run.wrap(network().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(optimizer=optimizer)
    rows = Slow(*data().tensors) if options.loader_workers else data()
    batches = DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=options.loader_workers)
    loader = run.loader(batches, global_batch=BATCH)

    def train() -> None:
        for _ in run.epochs(10_000):
            for x, y in loader:
                update(model, optimizer, x.to(run.device), y.to(run.device))
                if meter.step(options.step_s) or (options.stop and options.stop.exists()):
                    return

    run.retry(train)
    if run.is_main and meter.steps:
        meter.report()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps to time before ending; 0: until stopped"
    )
    parser.add_argument("--step-s", type=float, default=0.015, help="of sleep, in each step")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--stop", type=Path, help="end when this file exists")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    (train_plain if options.plain else train_elastic)(Meter(options.steps), options)


if __name__ == "__main__":
    main()
