"""Scripts with their own loop: ``run.attempts()`` inline, or a plug-in's begin and commit.

Each step's data is a function of its number, in equal shares. Float64: any difference between two
runs was lost, repeated or torn.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.nn.functional as F
from job_arguments import job_parser
from kit import nccl_semantics
from safetensors.torch import save_file
from torch import nn

import elastic
from elastic.testing.pacing import pause_after_step


def batch(
    number: int, rank: int, size: int, samples: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(
        samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
    )
    mine = x[rank::size].to(device)
    return mine, mine.sin().sum(1, keepdim=True)


def main() -> None:
    parser = job_parser()
    parser.add_argument("--api", choices=["attempts", "plugin"], required=True)
    options = parser.parse_args()
    steps = options.epochs * -(-options.samples // options.batch)
    hurry = options.folder / "hurry"
    if os.environ.get("TRAINING_BACKEND") == nccl_semantics.NAME:
        nccl_semantics.use_by_default()

    torch.manual_seed(0)
    run = elastic.join()
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(run.device)
    model = run.wrap(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    run.track(optimizer=optimizer, scheduler=scheduler)

    def note(what: str, **more: Any) -> None:
        line = {"what": what, "pid": os.getpid(), "generation": run.world.generation, **more}
        with (options.folder / "notes").open("a") as file:
            file.write(json.dumps(line) + "\n")

    run.on_world(lambda world: note("world", rank=world.rank, size=world.size))
    run.on_main(lambda: note("main"))

    def update(number: int) -> None:
        x, y = batch(number, run.world.rank, run.world.size, options.batch, run.device)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        pause_after_step(hurry, options.step_s, number / steps)

    def train() -> None:
        number = -1
        while number + 1 < steps:
            number = run.begin().number
            update(number)
            run.commit()

    if options.api == "attempts":
        for attempt in run.attempts():
            with attempt:
                train()
    else:
        number = -1
        while number + 1 < steps:
            try:
                number = run.begin().number
                update(number)
                run.commit()
            except Exception as error:
                if not run.is_fault(error):
                    raise
                number -= 1  # it was not committed
                run.recover(error)
    if run.is_main:
        weights = {k: v.detach().clone() for k, v in model.module.state_dict().items()}
        weights["rate"] = torch.tensor(scheduler.get_last_lr(), dtype=torch.float64)
        save_file(weights, options.folder / "final.safetensors")


if __name__ == "__main__":
    main()
