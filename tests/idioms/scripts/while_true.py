"""`while True` and `next`

As in nanoGPT, the batch is fetched at the end of the iteration. Without `run.epochs`, each pass
over the loader is one epoch.

Group: The loop
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
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
max_iters = 20


def train():
    run.state.setdefault("iter_num", 0)
    batches = iter(loader)
    while run.state["iter_num"] < max_iters:
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            continue
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.state["iter_num"] += 1


run.retry(train)
result = {**model.state_dict(), "iter_num": torch.tensor(run.state["iter_num"])}
