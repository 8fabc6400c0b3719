"""A diffusion model (DDPM) with an average in a class

`EMA` has the two methods that `run.track` needs. Time steps and noise are drawn in the loop.

Group: Averages and state
Compared: among ranks only, because each rank draws its own noise
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
dataset = TensorDataset(torch.randn(96, 4))


class EMA:
    def __init__(self, mu=0.999):
        self.mu = mu
        self.shadow = {}

    def register(self, module):
        for name, param in module.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self, module):
        for name, param in module.named_parameters():
            if param.requires_grad:
                average = (1.0 - self.mu) * param.data + self.mu * self.shadow[name].data
                self.shadow[name].data = average

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state_dict):
        self.shadow = state_dict


class Denoiser(nn.Module):
    def __init__(self, T):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.inp, self.out = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x, t):
        return self.out(F.silu(self.inp(x) + self.time(t)))


class Diffusion:
    def __init__(self, num_timesteps=20):
        self.num_timesteps = num_timesteps
        self.run = elastic.join()
        betas = torch.linspace(1e-4, 0.02, num_timesteps)
        self.alphas_cumprod = (1.0 - betas).cumprod(dim=0)

    def train(self):
        run = self.run
        self.model = run.wrap(Denoiser(self.num_timesteps))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.ema_helper = EMA(mu=0.9)
        self.ema_helper.register(self.model.module)
        run.track(optimizer=self.optimizer, ema=self.ema_helper)
        self.loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
        run.retry(self.loop)

    def loop(self):
        for epoch in self.run.epochs(2):
            for (x,) in self.loader:
                n = x.size(0)
                e = torch.randn_like(x)
                t = torch.randint(low=0, high=self.num_timesteps, size=(n // 2 + 1,))
                t = torch.cat([t, self.num_timesteps - t - 1], dim=0)[:n]
                a = self.alphas_cumprod[t][:, None]
                output = self.model(a.sqrt() * x + (1 - a).sqrt() * e, t)
                loss = (e - output).square().sum(dim=1).mean(dim=0)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.ema_helper.update(self.model.module)


runner = Diffusion()
runner.train()
result = dict(runner.model.state_dict())
result |= {f"ema.{name}": value for name, value in runner.ema_helper.shadow.items()}
