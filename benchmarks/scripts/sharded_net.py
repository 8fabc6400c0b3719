"""One model, trained in the way that the first argument names.

``hsdp``: replicas of ``--shard`` ranks, by ``elastic.join(mesh=…)``. ``ddp``: unsharded, by
``elastic.join()``. ``build``: FSDP2 over the world, by ``run.build``. ``restart``: FSDP2 over the
world in plain torch, with torch.distributed.checkpoint every ``--every`` steps, for restarts of all
workers. ``torch-hsdp``: torch's own HSDP, for ``--steps`` steps.

With ``--steps`` rank 0 prints one JSON line: seconds of wall and CPU per step, and the most memory
that it had, in MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import elastic
from elastic.telemetry.ledger import Ledger

SAMPLES, BATCH, WARM_UP = 4800, 48, 30
LAYERS = 2
NEVER = 1_000_000


class Compute:
    """Makes all steps equally long, with a sleep in place of computation: what their work takes, of
    which a model may need more than another one, is subtracted."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s  # 0: no sleep
        self._work_s: deque[float] = deque(maxlen=9)  # of the last steps, without their sleep
        self._ended_s = self._slept_s = 0.0

    def sleep(self) -> None:
        """Between the forward and the backward pass: until its end, no rank has all gradients."""
        if self._step_s and self._work_s:
            self._slept_s = max(0.0, self._step_s - statistics.median(self._work_s))
            time.sleep(self._slept_s)

    def step(self) -> None:
        """After each step."""
        now_s = time.perf_counter()
        if self._ended_s:
            self._work_s.append(now_s - self._ended_s - self._slept_s)
        self._ended_s, self._slept_s = now_s, 0.0


class Meter:
    """Times the steps after the warm-up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._count = 0
        self._began = (0.0, 0.0)
        self.compute = Compute(options.equal_step_s)

    def step(self) -> bool:
        """After each step; True when it was the last."""
        time.sleep(self._options.step_s)
        self.compute.step()
        self._count += 1
        if self._count == WARM_UP:
            self._began = time.perf_counter(), time.process_time()
        steps: int = self._options.steps
        return steps > 0 and self._count >= steps + WARM_UP

    def report(self) -> None:
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        steps, most = self._options.steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = {"wall_s": wall / steps, "cpu_s": cpu / steps, "memory_mib": most / 1024}
        print(json.dumps(result), flush=True)


def device() -> torch.device:
    """As ``run.device``."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def network(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 64)).to(device())


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.roll(1, 1))


def update(
    model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, compute: Compute
) -> None:
    x, y = x.to(device()), y.to(device())
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    compute.sleep()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train_elastic(options: argparse.Namespace) -> None:
    """``hsdp``, ``ddp`` and ``build``."""
    kind, width, meter = options.kind, options.width, Meter(options)
    folder = os.environ.get("ELASTIC_CHECKPOINTS")
    every = options.every if kind == "build" else False
    saves = elastic.Checkpoints(folder=folder, when=NEVER, memory=every) if folder else None
    run = elastic.join(mesh={"shard": options.shard} if kind == "hsdp" else None, checkpoints=saves)
    loader = run.loader(DataLoader(data(), batch_size=BATCH, shuffle=True), global_batch=BATCH)

    def build(mesh: Any) -> Any:
        model = shard(network(width), mesh)
        return model, torch.optim.AdamW(model.parameters())

    if kind != "build":
        plain = network(width)
        model = run.wrap(shard(plain, run.mesh["shard"]) if kind == "hsdp" else plain)
        optimizer = torch.optim.AdamW(model.parameters())
        run.track(optimizer=optimizer)

    def train() -> None:
        made = run.build(build) if kind == "build" else (model, optimizer)
        for _ in run.epochs(NEVER):
            for x, y in loader:
                update(made[0], made[1], x, y, meter.compute)
                if meter.step():
                    return

    run.retry(train)
    if run.is_main and options.steps:
        meter.report()


def train_plain(options: argparse.Namespace) -> None:
    """``restart`` and ``torch-hsdp``."""
    if device().type == "cuda":
        torch.cuda.set_device(device())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device().type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = {"shard": size}
    if options.kind == "torch-hsdp":
        shape = {"replicate": size // options.shard, "shard": options.shard}
    mesh = init_device_mesh(device().type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    model = shard(network(options.width), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    restarts = options.kind == "restart"
    folder = Path(os.environ["ELASTIC_CHECKPOINTS"]) if restarts else Path()
    step = load(folder, model, optimizer) if restarts else 0
    ledger = Ledger.from_environment()
    generation = json.loads(os.environ.get("ELASTIC_WORLD", "{}")).get("generation", 0)
    if restarts:
        node = os.environ["ELASTIC_NODE_NAME"]
        ledger.start(generation=generation, step=step, rank=rank, size=size, node=node)
    meter = Meter(options)
    for number, (x, y) in enumerate(batches(size), start=step):
        update(model, optimizer, x, y, meter.compute)
        if restarts:
            ledger.step(generation=generation, step=number, epoch=0, rank=rank, samples=())
            if (number + 1) % options.every == 0:
                save(folder, model, optimizer, number + 1)
        if meter.step():
            break
    if rank == 0 and options.steps:
        meter.report()
    dist.destroy_process_group()


def batches(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's, without end, as ``run.loader`` gives them."""
    rows = data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=BATCH // size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    dcp_save(state_of(model, optimizer), checkpoint_id=folder / f"{step:09}")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """From the newest complete checkpoint; its step, or 0."""
    complete = sorted(path.parent.name for path in folder.glob("*/.metadata"))
    newest = [complete[-1] if complete else None]
    dist.broadcast_object_list(newest)
    if newest[0] is None:
        return 0
    state = state_of(model, optimizer)
    dcp_load(state, checkpoint_id=folder / newest[0])
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return int(newest[0])


KINDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "hsdp": train_elastic,
    "ddp": train_elastic,
    "build": train_elastic,
    "restart": train_plain,
    "torch-hsdp": train_plain,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--shard", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps to time before ending; 0: until stopped"
    )
    parser.add_argument("--step-s", type=float, default=0.015, help="of sleep, in each step")
    parser.add_argument(
        "--equal-step-s", type=float, default=0.0, help="of all steps; 0: not equal"
    )
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    KINDS[options.kind](options)


if __name__ == "__main__":
    main()
