"""Trains replicas of a mixture of experts: the ranks of a replica hold different experts.

    python examples/experts.py --ranks 1
    elastic run --nodes-local 2 --embedded-etcd --nnodes=1:2 --nproc-per-node=2 \\
        examples/experts.py --checkpoints /tmp/experts

Two nodes of two workers are two replicas, whose ranks see the same samples. Each computes its own
experts for the tokens that the router has chosen for them, and the results are summed over
``run.mesh["ep"]``. Kill a worker or a node: the other replica continues in its processes, and each
replaced rank receives its experts from the rank at its place. Rank 0 prints JSON lines.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import elastic

WIDTH, HIDDEN, EXPERTS, CHOSEN = 16, 32, 4, 2


class ToExperts(torch.autograd.Function):
    """The tokens, on every rank. Each rank's experts contribute to their gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class FromExperts(torch.autograd.Function):
    """The sum of what the experts of all ranks have computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Experts(nn.Module):
    """Two layers of each expert, sharded over the ranks by experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.up, self.down = (
            nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
            for weight in (
                torch.randn(EXPERTS, WIDTH, HIDDEN, device=mesh.device_type) / WIDTH**0.5,
                torch.randn(EXPERTS, HIDDEN, WIDTH, device=mesh.device_type) / HIDDEN**0.5,
            )
        )

    def forward(self, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """``scores``, ``chosen``: of the experts that each token goes to."""
        x, scores = (ToExperts.apply(given, self.group) for given in (x, scores))
        found = x * 0.0
        up, down = local(self.up), local(self.down)
        first = self.group.rank() * len(up)
        for number in range(len(up)):
            tokens, place = (chosen == first + number).nonzero(as_tuple=True)
            y = F.gelu(x[tokens] @ up[number]) @ down[number]
            found = found.index_add(0, tokens, y * scores[tokens, place].unsqueeze(1))
        return FromExperts.apply(found, self.group)


def local(weight: torch.Tensor) -> torch.Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


class Net(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.head = Experts(mesh), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        tokens = self.norm(hidden)
        scores, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        return self.head(hidden + self.experts(tokens, scores, chosen))


def waves(samples: int) -> TensorDataset:
    """Synthetic regression."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 8, dtype=torch.float64, generator=generator)
    return TensorDataset(x, (x @ torch.randn(8, 1, dtype=x.dtype, generator=generator)).tanh())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--weights", type=Path, help="where the trained weights are written")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a replica")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--global-batch", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every-steps", type=int, default=50)
    options = parser.parse_args()

    torch.manual_seed(0)  # the same router on all ranks
    torch.set_default_dtype(torch.float64)
    saves = None
    if options.checkpoints is not None:
        saves = elastic.Checkpoints(folder=options.checkpoints, when=options.every_steps)
    run = elastic.join(mesh={"ep": options.ranks}, checkpoints=saves)
    model = run.wrap(Net(run.mesh["ep"]).to(run.device))
    # Parameters are DTensors and tensors, so no single kernel can update all of them.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    run.track(optimizer=optimizer)
    loader = run.loader(
        DataLoader(waves(options.samples), batch_size=options.global_batch, shuffle=True),
        global_batch=options.global_batch,
    )

    def train() -> None:
        for epoch in run.epochs(options.epochs):
            losses = []  # empty if a world has ended after the last step of the epoch
            for x, y in loader:
                loss = F.mse_loss(model(x.to(run.device)), y.to(run.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            seen = run.mean(len(losses), loss=sum(losses) / max(1, len(losses)))
            if run.is_main:
                print(json.dumps({"epoch": epoch, "replicas": run.world.replicas, **seen}))

    run.retry(train)
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    if run.is_main and options.weights is not None:
        save_file({name: value.cpu() for name, value in whole.items()}, options.weights)


if __name__ == "__main__":
    main()
