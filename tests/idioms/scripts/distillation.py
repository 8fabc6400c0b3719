"""Distillation from a frozen teacher

Do not wrap the teacher: it has no gradients to reduce.

Group: Models
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
teacher = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).eval()
teacher.requires_grad_(False)
student = run.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            with torch.no_grad():
                soft = teacher(inputs)
            output = student(inputs)
            loss = 0.3 * F.mse_loss(output, targets) + 0.7 * F.mse_loss(output, soft)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = student.state_dict()
