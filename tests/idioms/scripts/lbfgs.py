"""LBFGS after Adam, with the usual closure

As for physics-informed networks. LBFGS decides by the loss how far to go: it gets that of all
ranks, averaged like the gradients, in a collective for each call of the closure.

Group: Optimizers and learning rates
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(50, 2)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
adam = torch.optim.Adam(model.parameters(), lr=0.01)
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
run.track(adam=adam, lbfgs=lbfgs)
loader = run.loader(DataLoader(dataset, batch_size=50), global_batch=50)


def train():
    for epoch in run.epochs(8):
        optimizer = adam if epoch < 4 else lbfgs
        for inputs, targets in loader:

            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)


run.retry(train)
result = model.state_dict()
