"""LoRA: adapters of a frozen model

Inject the adapters before `run.wrap`, and merge them after `run.retry`. To merge and separate them
around an evaluation changes the weights in the loop: save checkpoints.

Group: Models
"""

import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2, alpha=4):
        super().__init__()
        self.base, self.scale, self.merged = base.requires_grad_(False), alpha / rank, False
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs):
        outputs = self.base(inputs)
        return outputs if self.merged else outputs + inputs @ self.a.T @ self.b.T * self.scale

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.scale * self.b @ self.a
        self.merged = True


network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for index in (0, 2):
    network[index] = LoRALinear(network[index])

folder = tempfile.mkdtemp()
run = elastic.join()
model = run.wrap(network)
adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.AdamW(adapters.values(), lr=0.02)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
val_loader = run.shard(DataLoader(dataset, batch_size=16))


@torch.no_grad()
def evaluate():
    model.eval()
    losses = [F.mse_loss(model(a), b, reduction="sum") for a, b in val_loader]
    seen = sum(len(a) for a, _ in val_loader)
    loss = run.mean(seen, loss=sum(losses) / max(seen, 1))["loss"]
    model.train()
    return loss


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        run.state[f"loss {epoch}"] = evaluate()
        if run.is_main:
            torch.save(adapters, os.path.join(folder, "adapters.pt"))


run.retry(train)
for module in model.modules():
    if isinstance(module, LoRALinear):
        module.merge()
losses = {key: torch.tensor(value) for key, value in run.state.items()}
result = {**model.state_dict(), **losses}
