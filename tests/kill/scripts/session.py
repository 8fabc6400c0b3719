"""A training script with this project's API, for fault-injection tests.

While a file ``hold-start`` exists in the folder, starting workers do not join.

Float64, so that a different world size changes the sums by 1e-15 and not by 1e-6: any larger
difference in the weights was lost, repeated or torn.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from job_arguments import job_parser
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic
from elastic.testing.pacing import pause_after_step


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Synthetic regression; until ``hurry`` exists, ``__getitem__`` takes ``busy_s``.

    It must be inside ``__getitem__``: a DataLoader worker checks for its parent's death only while
    it waits for work.
    """

    def __init__(self, n: int, busy_s: float, hurry: Path) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(n, 8, dtype=torch.float64, generator=generator)
        self.y = (self.x @ torch.randn(8, 1, dtype=torch.float64, generator=generator)).tanh()
        self.busy_s = busy_s
        self.hurry = hurry

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.busy_s and not self.hurry.exists():
            time.sleep(self.busy_s)
        return self.x[index], self.y[index]


def main() -> None:
    parser = job_parser()
    parser.add_argument("--memory-every", type=int, default=0)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--busy-s", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    while (options.folder / "hold-start").exists():
        time.sleep(0.02)

    torch.manual_seed(0)
    run = elastic.join(
        checkpoints=elastic.Checkpoints(
            folder=os.environ["ELASTIC_CHECKPOINTS"],
            when=options.save_every,
            memory=options.memory_every or False,
        )
    )
    hurry = options.folder / "hurry"
    width = options.width
    module = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)).double()
    module.to(run.device)
    model = run.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    run.track(optimizer=optimizer)
    loader = run.loader(
        DataLoader(
            Waves(options.samples, options.busy_s if options.loader_workers else 0.0, hurry),
            batch_size=options.batch,
            # An empty dataset: torch refuses to shuffle it before our code can report the error.
            shuffle=options.samples > 0,
            num_workers=options.loader_workers,
        ),
        global_batch=options.batch,
    )

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            for x, y in loader:
                x, y = x.to(run.device), y.to(run.device)
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                run.log(loss=loss)
                pause_after_step(hurry, options.step_s, epoch / options.epochs)

    run.retry(train)
    if run.is_main:
        weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
        save_file(weights, options.folder / "final.safetensors")


if __name__ == "__main__":
    main()
