"""timm's training loop

Mixup, accumulation under `no_sync` with a shorter last group, `ModelEmaV2`, and a scheduler that
steps after each update.

Compared: among ranks only, because each rank draws its own random numbers for mixup
Group: The loop
"""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1.0 - self.decay) * m)


class CosineLRScheduler:
    def __init__(self, optimizer, t_initial):
        self.optimizer, self.t = optimizer, t_initial
        self.base = [g["lr"] for g in optimizer.param_groups]

    def state_dict(self):
        return {k: v for k, v in vars(self).items() if k != "optimizer"}

    def load_state_dict(self, s):
        vars(self).update(s)

    def step_update(self, num_updates):
        for g, b in zip(self.optimizer.param_groups, self.base):
            g["lr"] = b * 0.5 * (1 + math.cos(math.pi * num_updates / self.t))


class Mixup:
    def __call__(self, x, y):
        lam = np.random.beta(0.8, 0.8)
        return x * lam + x.flip(0) * (1 - lam), y * lam + y.flip(0) * (1 - lam)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n


run = elastic.join()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
model_ema = ModelEmaV2(model)
model = run.wrap(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
accum_steps = 3
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
lr_scheduler = CosineLRScheduler(optimizer, 2 * updates_per_epoch)
run.track(optimizer=optimizer, ema=model_ema, scheduler=lr_scheduler)
mixup_fn = Mixup()


def train_one_epoch(epoch):
    losses_m = AverageMeter()
    model.train()
    last_accum_steps = len(loader) % accum_steps
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader, start=loader.index):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % accum_steps == 0
        update_idx = batch_idx // accum_steps
        n = last_accum_steps if batch_idx >= last_batch_idx_to_accum else accum_steps
        input, target = mixup_fn(input, target)
        if need_update:
            loss = F.mse_loss(model(input), target) / n
            loss.backward()
        else:
            with model.no_sync():
                loss = F.mse_loss(model(input), target) / n
                loss.backward()
        losses_m.update(loss.item() * n, len(input))
        if not need_update:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update(model.module)
        num_updates = epoch * updates_per_epoch + update_idx + 1
        lr_scheduler.step_update(num_updates=num_updates)


def train():
    for epoch in run.epochs(2):
        train_one_epoch(epoch)


run.retry(train)
result = {**model.state_dict(), **{f"ema.{k}": v for k, v in model_ema.state_dict().items()}}
