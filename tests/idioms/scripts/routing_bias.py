"""A mixture of experts with a routing bias, balanced by a hook of the optimizer

As in torchtitan: forward passes count the tokens of each expert in a buffer, and a hook before the
update sums the counts over all ranks. Buffers are part of the state, and a hook that a death
interrupts is repeated with the step.

Group: Models
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class MixtureOfExperts(nn.Module):
    def __init__(self, dim=4, experts=4):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, 1) for _ in range(experts))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("tokens", torch.zeros(experts), persistent=False)

    def forward(self, inputs):
        scores = self.gate(inputs).softmax(-1)
        chosen = (scores + self.bias).topk(2, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.tokens += mask.sum(0).detach()
        outputs = torch.cat([expert(inputs) for expert in self.experts], -1)
        return (outputs * scores * mask).sum(-1, keepdim=True)


run = elastic.join()
model = run.wrap(MixtureOfExperts())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


@torch.no_grad()
def update_bias(*_):
    layer = model.module
    dist.all_reduce(layer.tokens)
    layer.bias += 0.01 * (layer.tokens.mean() - layer.tokens).sign()
    layer.tokens.zero_()


optimizer.register_step_pre_hook(update_bias)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
