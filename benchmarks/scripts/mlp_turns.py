"""The step of mlp.py under plain DDP and under the harness, in turns within each process.

Two jobs, one after the other, differ by more than what is looked for: where their memory lies,
what else the machine does. Here both sides share it all. Prints one JSON object: per round the
ratio of the step times and the difference in CPU time per step, means over all ranks; and the CPU
time that a process takes per second while nothing is trained, which both sides of a round carry:
without gloo's threads, which look around a hundred times a second under plain DDP, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mlp import BATCH, data, network, update
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import elastic

WARM_UP = 5  # steps, in each turn
IDLE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--step-s", type=float, default=0.015, help="of sleep, in each step")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run = elastic.join()
    model = run.wrap(network())
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(optimizer=optimizer)
    run.untracked("DataLoader")  # the plain side's
    rows = data()
    loader = run.loader(DataLoader(rows, batch_size=BATCH, shuffle=True), global_batch=BATCH)

    def ours() -> Generator[None, None, None]:
        for _ in run.epochs(10_000):
            for x, y in loader:
                update(model, optimizer, x, y)
                yield

    def plain() -> Generator[None, None, None]:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.AdamW(model.parameters())
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(rows)
        size = BATCH // dist.get_world_size()
        batches = DataLoader(rows, batch_size=size, sampler=sampler, drop_last=True)
        for epoch in count():
            sampler.set_epoch(epoch)
            for x, y in batches:
                update(model, optimizer, x, y)
                yield

    def train() -> None:
        in_world = ours()
        next(in_world)  # in a world from here on
        sides = {"plain": plain(), "elastic": in_world}
        found = take_turns(sides, options, random.Random(0))
        if run.is_main:
            print(json.dumps(found), flush=True)
        for side in sides.values():
            side.close()

    run.retry(train)


def take_turns(
    sides: dict[str, Generator[None, None, None]], options: argparse.Namespace, rng: random.Random
) -> dict[str, list[float]]:
    """A turn of each side in every round, in a random order that is the same on all ranks."""
    ratios, cpu_ms = [], []
    for number in range(options.rounds + 1):
        took = {}
        for name in rng.sample(sorted(sides), len(sides)):
            with unwatched() if name == "plain" else nullcontext():
                took[name] = turn(sides[name], options)
        if number:  # the first finds its memory
            (plain_s, plain_cpu_s), (ours_s, ours_cpu_s) = took["plain"], took["elastic"]
            ratios.append(ours_s / plain_s)
            cpu_ms.append(1000 * (ours_cpu_s - plain_cpu_s))
    before_s = own_cpu_s()
    time.sleep(IDLE_S)
    idle = 1000 * (own_cpu_s() - before_s) / IDLE_S
    return {"ratio": ratios, "cpu_ms": cpu_ms, "idle_cpu_ms_per_s": [idle]}


def own_cpu_s() -> float:
    """Of all threads but gloo's."""
    total_ns = 0
    for task in Path("/proc/self/task").iterdir():
        if "gloo" not in (task / "comm").read_text():
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def turn(side: Generator[None, None, None], options: argparse.Namespace) -> tuple[float, float]:
    """Seconds and seconds of CPU per step."""

    def steps(count: int) -> None:
        for _ in range(count):
            next(side)
            time.sleep(options.step_s)

    steps(WARM_UP)
    wall_s, cpu_s = of_all_ranks(lambda: steps(options.steps))
    return wall_s / options.steps, cpu_s / options.steps


@contextmanager
def unwatched() -> Iterator[None]:
    """Optimizers step without the harness: its hooks are on all of torch's."""
    hooks: tuple[dict[int, Any], ...] = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    kept = [dict(table) for table in hooks]
    for table in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, before in zip(hooks, kept, strict=True):
            table.update(before)


def of_all_ranks(work: Callable[[], None]) -> tuple[float, float]:
    """The mean of what it takes them, in seconds and in seconds of CPU of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    taken = torch.tensor(
        [time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64
    )
    dist.all_reduce(taken)
    wall_s, cpu_s = (taken / dist.get_world_size()).tolist()
    return wall_s, cpu_s


if __name__ == "__main__":
    main()
