"""Trains with subgroups that are created in each world: pairs of ranks, and the pairs' leaders.

    python examples/subgroups.py
    elastic run --nodes-local 4 --embedded-etcd --nnodes=1:4 examples/subgroups.py

A change of the world destroys torch's default group, and every group from ``dist.new_group`` with
it. ``run.on_world`` registers a callback for the next world: it creates the new groups, on all
ranks in the same order, and stores them in ``groups``, from where the loop reads them. The mean
loss is computed within pairs, then among the pairs' leaders, and compared with that of the world.
"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic


class Hierarchy:
    """Pairs of neighbouring ranks, and the group of the first rank of each pair."""

    def __init__(self, world):
        self.rank = world.rank
        pairs = [list(range(i, min(i + 2, world.size))) for i in range(0, world.size, 2)]
        # Every rank creates all groups in the same order, including those of other ranks.
        groups = [dist.new_group(ranks) for ranks in pairs]
        self.pair, self.leader = groups[self.rank // 2], pairs[self.rank // 2][0]
        self.leaders = dist.new_group([ranks[0] for ranks in pairs])

    def sum(self, values):
        """The sum over the world, of a tensor that is changed in place."""
        dist.reduce(values, self.leader, group=self.pair)
        if self.rank == self.leader:
            dist.all_reduce(values, group=self.leaders)
        dist.broadcast(values, self.leader, group=self.pair)
        return values


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=480)
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(args.samples, 8)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

    run = elastic.join()
    model = run.wrap(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(run.device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(optimizer=optimizer)
    loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=24)
    groups = {}

    @run.on_world
    def regroup(world):
        groups["hierarchy"] = Hierarchy(world)

    def train():
        for epoch in run.epochs(args.epochs):
            mean = float("nan")
            for x, y in loader:
                x, y = x.to(run.device), y.to(run.device)
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                ours = torch.tensor([loss.item() * len(x), len(x)], device=run.device)
                total, count = groups["hierarchy"].sum(ours).tolist()
                mean = total / count
                check = run.mean(len(x), loss=loss.item())["loss"]
                assert abs(mean - check) < 1e-4 * max(1.0, check), (mean, check)
            if run.is_main:
                print(
                    json.dumps({"epoch": epoch, "size": run.world.size, "loss": mean}), flush=True
                )

    run.retry(train)
    return model


if __name__ == "__main__":
    main()
