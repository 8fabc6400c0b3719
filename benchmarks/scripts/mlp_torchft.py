"""The training of mlp.py as torchft wants it: one replica. Runs in torchft's own environment.

With ``--record`` each committed step is a line of ``time step replicas``, the wall clock of the one
machine first. Otherwise it prints what mlp.py prints at the end of a timed run.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from mlp import BATCH, Meter, data, network
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

REPLICAS = 3


class Record:
    """Appends committed steps; one write each."""

    def __init__(self, path: Path | None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if path else None

    def step(self, number: int, replicas: int) -> None:
        if self._fd is not None:
            os.write(self._fd, f"{time.time():.6f} {number} {replicas}\n".encode())


def train(options: argparse.Namespace, meter: Meter) -> None:
    net = network()
    inner = torch.optim.AdamW(net.parameters())
    timeout = timedelta(seconds=options.timeout_s)

    def state() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        timeout=timeout,
        heartbeat_interval=timedelta(milliseconds=options.heartbeat_ms),
        replica_id=f"replica_{options.replica}",
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    record = Record(options.record)
    rows = data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        rows, num_replicas=REPLICAS, rank=options.replica % REPLICAS
    )
    loader = DataLoader(rows, batch_size=BATCH // REPLICAS, sampler=sampler, drop_last=True)
    for epoch in range(10_000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            before = manager.current_step()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if manager.current_step() == before:
                continue  # torchft dropped this batch
            record.step(manager.current_step(), manager.num_participants())
            if meter.step(options.step_s):
                meter.report()
                # The others still count on this replica; let them commit their last step too.
                time.sleep(1.0)
                os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--heartbeat-ms", type=float, required=True)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--steps", type=int, default=0, help="time so many and end; 0: no end")
    parser.add_argument("--step-s", type=float, default=0.015, help="of sleep, in each step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options, Meter(options.steps))


if __name__ == "__main__":
    main()
