"""Evolution strategies: gradients without a backward pass

A step is one generation, between `run.begin` and `run.commit`. Ranks share the population, and sum
the scores. The model is tracked, not wrapped; every rank computes the same gradients.

Group: The loop
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(30, 3)
y = x.sum(1, keepdim=True).sin()
population, sigma, generations = 12, 0.1, 12

run = elastic.join()
policy = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
run.track(policy=policy, optimizer=optimizer)


def parts(vector):
    sizes = [p.numel() for p in policy.parameters()]
    return [v.view_as(p) for v, p in zip(vector.split(sizes), policy.parameters())]


@torch.no_grad()
def fitness(vector):
    params = {name: v for (name, _), v in zip(policy.named_parameters(), parts(vector))}
    return -F.mse_loss(functional_call(policy, params, x), y)


def train():
    run.state.setdefault("fitness", [])
    while True:
        step = run.begin()
        if step.number == generations:
            return
        theta = nn.utils.parameters_to_vector(policy.parameters()).detach()
        generator = torch.Generator().manual_seed(step.number)
        noise = torch.randn(population, len(theta), generator=generator)
        scores = torch.zeros(population)
        for k in range(run.world.rank, population, run.world.size):
            scores[k] = fitness(theta + sigma * noise[k])
        dist.all_reduce(scores)
        advantages = (scores - scores.mean()) / scores.std()
        for p, g in zip(policy.parameters(), parts(-(advantages[:, None] * noise).mean(0) / sigma)):
            p.grad = g.clone()
        optimizer.step()
        run.state["fitness"].append(scores.mean().item())
        run.commit()


run.retry(train)
result = {**policy.state_dict(), "fitness": torch.tensor(run.state["fitness"])}
