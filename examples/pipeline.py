"""Trains replicas of a pipeline: the ranks of a replica hold different stages of the model.

    python examples/pipeline.py --stages 1
    elastic run --nodes-local 2 --embedded-etcd --nnodes=1:2 --nproc-per-node=2 \\
        examples/pipeline.py --checkpoints /tmp/pipeline

Two nodes of two workers are two replicas of two stages, which send activations and gradients to
each other over ``run.mesh["pp"]``: all forward passes of a step, then all backward passes (GPipe).
Kill a worker or a node: the other replica continues in its processes, and each replaced rank
receives its stage from the rank at its place. Rank 0 prints JSON lines.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

WIDTH, MICRO_BATCHES = 16, 2


class Stage(nn.Module):
    """Some consecutive layers, under their numbers in the whole model."""

    def __init__(self, layers: list[nn.Module], index: int, count: int) -> None:
        super().__init__()
        cuts = [len(layers) * n // count for n in (index, index + 1)]
        self.layers = nn.ModuleDict({str(n): layers[n] for n in range(*cuts)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Pipeline:
    """Runs the forward and backward passes of one step on this rank's stage."""

    def __init__(self, stage: nn.Module, run: elastic.Run) -> None:
        pp = run.mesh["pp"]
        self.stage, self.device, self.group = stage, run.device, pp.get_group()
        self.place, self.last = pp.get_local_rank(), pp.size() - 1

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Accumulate gradients; returns the mean loss on the last stage, 0 on the others."""
        inputs = [self._inputs(part) for part in x.chunk(MICRO_BATCHES)]
        outputs = [self._forward(part) for part in inputs]
        total = 0.0
        for part, output, target in zip(inputs, outputs, y.chunk(MICRO_BATCHES), strict=True):
            if self.place == self.last:
                loss = F.mse_loss(output, target, reduction="sum") / len(y)
                loss.backward()
                total += loss.item()
            else:
                gradient = torch.empty_like(output)
                dist.recv(gradient, group=self.group, group_src=self.place + 1)
                output.backward(gradient)
            if self.place > 0:
                dist.send(part.grad, group=self.group, group_dst=self.place - 1)
        return total

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == 0:
            return x
        received = torch.empty(len(x), WIDTH, dtype=x.dtype, device=self.device)
        dist.recv(received, group=self.group, group_src=self.place - 1)
        return received.requires_grad_()

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.stage(x)
        if self.place < self.last:
            dist.send(output.detach(), group=self.group, group_dst=self.place + 1)
        return output


def waves(samples: int) -> TensorDataset:
    """Synthetic regression."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(x, (x @ torch.randn(8, 1, dtype=x.dtype, generator=generator)).tanh())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--weights", type=Path, help="where the trained weights are written")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every-steps", type=int, default=50)
    options = parser.parse_args()

    torch.manual_seed(0)
    saves = None
    if options.checkpoints is not None:
        saves = elastic.Checkpoints(folder=options.checkpoints, when=options.every_steps)
    run = elastic.join(mesh={"pp": options.stages}, checkpoints=saves)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    layers = [nn.Linear(8, WIDTH), *middle, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)]
    pp = run.mesh["pp"]
    stage = Stage(layers, pp.get_local_rank(), pp.size()).to(run.device, torch.float64)
    stage = run.wrap(stage)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    run.track(optimizer=optimizer)
    data = waves(options.samples)
    loader = run.loader(
        DataLoader(data, batch_size=options.global_batch, shuffle=True),
        global_batch=options.global_batch,
    )

    def train() -> None:
        pipeline = Pipeline(stage, run)
        for epoch in run.epochs(options.epochs):
            losses = []  # empty if a world has ended after the last step of the epoch
            for x, y in loader:
                optimizer.zero_grad()
                losses.append(pipeline.step(x.to(run.device), y.to(run.device)))
                run.reduce_gradients()
                optimizer.step()
            count = len(losses) if pipeline.place == pipeline.last else 0  # only it knows the loss
            seen = run.mean(count, loss=sum(losses) / max(1, len(losses)))
            if run.is_main:
                print(json.dumps({"epoch": epoch, "replicas": run.world.replicas, **seen}))

    run.retry(train)
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(pp.size())]
    dist.all_gather_object(stages, stage.state_dict(), group=pp.get_group())
    if run.is_main and options.weights is not None:
        save_file({name: t.cpu() for one in stages for name, t in one.items()}, options.weights)


if __name__ == "__main__":
    main()
