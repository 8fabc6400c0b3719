"""A script with two datasets, one of them drawn by weights, that counts its own steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from job_arguments import job_parser
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import elastic
from elastic.testing.pacing import pause_after_step


def data(samples: int, seed: int) -> TensorDataset:
    x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def main() -> None:
    options = job_parser().parse_args()
    hurry = options.folder / "hurry"

    torch.manual_seed(0)
    run = elastic.join()
    model = run.wrap(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(optimizer=optimizer)
    weights = torch.linspace(0.0, 1.0, options.samples)
    sampler = WeightedRandomSampler(weights, 2 * options.samples)  # type: ignore[arg-type]
    labelled = run.loader(
        DataLoader(data(options.samples, 1), options.batch, sampler=sampler, drop_last=True),
        global_batch=options.batch,
        max_steps=15,
    )
    others = run.loader(
        DataLoader(data(18 * options.batch, 2), options.batch, shuffle=True, drop_last=True),
        global_batch=options.batch,
    )

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            pairs = zip(labelled, others, strict=False)
            for i, ((x, y), (u, v)) in enumerate(pairs, start=labelled.index):
                assert i == labelled.index, (i, labelled.index)
                loss = F.mse_loss(model(torch.cat([x, u])), torch.cat([y, v]))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                pause_after_step(hurry, options.step_s, epoch / options.epochs)
            assert labelled.index == len(labelled) == 15

    run.retry(train)
    if run.is_main:
        save_file(
            {name: value.detach().clone() for name, value in model.module.state_dict().items()},
            options.folder / "final.safetensors",
        )


if __name__ == "__main__":
    main()
