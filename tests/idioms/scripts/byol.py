"""BYOL: an online network, a predictor, and a target network

Compared: among ranks only, because each rank draws its own augmentations
Group: Models
"""

import copy

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
online_encoder = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
predictor = run.wrap(nn.Linear(4, 4))
target_encoder = copy.deepcopy(online_encoder)
for p in target_encoder.parameters():
    p.requires_grad = False
optimizer = torch.optim.SGD(
    [*online_encoder.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9
)
run.track(optimizer=optimizer, target=target_encoder)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def loss_fn(p, z):
    return 2 - 2 * (F.normalize(p, dim=-1) * F.normalize(z, dim=-1)).sum(-1)


def train():
    for epoch in run.epochs(2):
        for images, _ in loader:
            one, two = (
                images + 0.1 * torch.randn_like(images),
                images + 0.1 * torch.randn_like(images),
            )
            p1, p2 = predictor(online_encoder(one)), predictor(online_encoder(two))
            with torch.no_grad():
                t1, t2 = target_encoder(one), target_encoder(two)
            loss = (loss_fn(p1, t2) + loss_fn(p2, t1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for o, t in zip(online_encoder.parameters(), target_encoder.parameters()):
                    t.data = 0.9 * t.data + 0.1 * o.data


model = online_encoder
run.retry(train)
result = {
    **model.state_dict(),
    **{f"target.{k}": v for k, v in target_encoder.state_dict().items()},
}
