"""Drawing random numbers in the loop

Noise, mixup coefficients and diffusion time steps are drawn from (seed, step, rank): ranks draw
different numbers, and a repeated step draws the same ones.

Compared: among ranks only, because each rank draws its own numbers
Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for clean, _ in loader:
            t = torch.rand(len(clean), 1)
            noise = torch.randn_like(clean)
            noisy = (1 - t) * clean + t * noise
            loss = F.mse_loss(model(torch.cat([noisy, t], dim=1)), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
