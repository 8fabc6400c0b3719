"""Local updates between averages (DiLoCo, local SGD)

One step of the job is one outer step: `run.begin` before the inner steps, and `run.commit` after
the outer optimizer. An interrupted step repeats its inner steps from the last average, so ranks
never differ between steps. The model is tracked and not wrapped, because its gradients are not
averaged; the outer parameters are tracked as an `nn.ParameterList`. The moments of the inner
optimizer differ between ranks, and a joining node gets those of another rank.

Group: Gradients
Compared: among ranks only, because each rank draws its own batches
Tolerance: 1, because a death loses the moments of one rank
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
inner_steps, outer_steps, batch_size = 3, 6, 8
inputs = torch.randn(192, 4)
targets = inputs.sin().sum(1, keepdim=True)

run = elastic.join()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
outer_params = nn.ParameterList(p.detach().clone() for p in model.parameters())
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
outer = torch.optim.SGD(outer_params, lr=0.7, momentum=0.9, nesterov=True)
run.track(model=model, inner=inner, outer=outer, outer_params=outer_params)


def get_batch():
    index = torch.randint(len(inputs), (batch_size,))
    return inputs[index], targets[index]


def train():
    while True:
        step = run.begin()
        if step.number == outer_steps:
            return
        for _ in range(inner_steps):
            x, y = get_batch()
            inner.zero_grad()
            F.mse_loss(model(x), y).backward()
            inner.step()
        for param, outer_param in zip(model.parameters(), outer_params):
            delta = outer_param.detach() - param.detach()
            dist.all_reduce(delta)
            outer_param.grad = delta / dist.get_world_size()
        outer.step()
        with torch.no_grad():
            for param, outer_param in zip(model.parameters(), outer_params):
                param.copy_(outer_param)
        run.commit()


run.retry(train)
result = model.state_dict()
