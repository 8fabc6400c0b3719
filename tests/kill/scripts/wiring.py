"""A training script with one of four wirings, under a launcher or as plain python.

``--wiring``: ``retry`` (in-process where the launcher can), ``none`` (no ``run.retry``),
``foreign`` (``run.retry`` in a process group created by the script) or ``deferred`` (the script
calls ``init_process_group`` after ``elastic.join``, and writes its rank and the size there into
``rank-PID``). While a file
``hold`` exists in the folder, every worker is held in the script's own code, in the middle of a
step; with ``hold-start``, each starting worker is held before it joins; with ``fail-start``, one
fails there; with ``disk-full``, no part of a checkpoint can be written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time

import torch
import torch.distributed as dist
from job_arguments import job_parser
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from checkpoints import LocalStorage
from checkpoints.testing import FaultyStorage
from elastic.testing.pacing import pause_after_step


def main() -> None:
    parser = job_parser()
    parser.add_argument("--memory-every", type=int, default=0)
    parser.add_argument(
        "--wiring", choices=("retry", "none", "foreign", "deferred"), default="retry"
    )
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.wiring == "foreign" and "RANK" in os.environ:
        dist.init_process_group("gloo")
    elif options.wiring == "foreign":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]

    while (options.folder / "hold-start").exists():
        time.sleep(0.02)
    with contextlib.suppress(FileNotFoundError):
        (options.folder / "fail-start").unlink()
        sys.exit("fail-start")

    def before(label: str) -> None:
        if "safetensors" in label and (options.folder / "disk-full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = elastic.join(
        checkpoints=elastic.Checkpoints(
            folder=FaultyStorage(LocalStorage(os.environ["ELASTIC_CHECKPOINTS"]), before=before),
            when=options.save_every,
            memory=options.memory_every or False,
        )
    )
    if options.wiring == "deferred":
        dist.init_process_group("gloo")
        place = f"{dist.get_rank()} {dist.get_world_size()} {int(os.environ['MASTER_PORT'])}"
        (options.folder / f"rank-{os.getpid()}").write_text(place)
    hold, hurry = options.folder / "hold", options.folder / "hurry"
    model = run.wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(optimizer=optimizer)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(options.samples, 8, dtype=torch.float64, generator=generator)
    y = (x @ torch.randn(8, 1, dtype=torch.float64, generator=generator)).tanh()
    loader = run.loader(
        DataLoader(TensorDataset(x, y), batch_size=options.batch, shuffle=True),
        global_batch=options.batch,
    )

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            for inputs, targets in loader:
                while hold.exists():
                    (options.folder / f"held-{os.getpid()}").touch()
                    time.sleep(0.02)
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                pause_after_step(hurry, options.step_s, epoch / options.epochs)

    if options.wiring == "none":
        train()
    else:
        run.retry(train)
    if run.is_main:
        weights = {k: v.detach().clone() for k, v in model.module.state_dict().items()}
        save_file(weights, options.folder / "final.safetensors")


if __name__ == "__main__":
    main()
