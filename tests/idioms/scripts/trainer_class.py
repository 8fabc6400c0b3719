"""A trainer class with callbacks

As in minGPT. `run.retry` calls `trainer.run`.

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


class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.callbacks = []

    def run_epochs(self, epochs):
        self.model.train()
        for self.epoch in run.epochs(epochs):
            for iter_num, batch in enumerate(self.loader, start=self.loader.index):
                self.iter_num = iter_num
                inputs, targets = [t.to(run.device) for t in batch]
                self.loss = F.mse_loss(self.model(inputs), targets)
                self.model.zero_grad(set_to_none=True)
                self.loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                for callback in self.callbacks:
                    callback(self)


model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
trainer = Trainer(model, optimizer, loader)
trainer.callbacks.append(lambda t: print(f"epoch {t.epoch} iter {t.iter_num}"))
run.retry(trainer.run_epochs, 2)
result = model.state_dict()
