"""An iterator in an attribute

It outlives the training function, which ends within a pass. The last step is committed when the
function returns, or when the script ends. A step is counted after its update, and the count
compared after that (nanoGPT, minGPT): after a death in the last step, that step is repeated, and
none is added.

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
    def __init__(self, model, max_steps):
        self.model = run.wrap(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        run.track(optimizer=self.optimizer)
        self.loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
        self.max_steps = max_steps

    def next_batch(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)

    def fit(self):
        self.batches = iter(self.loader)
        steps = run.state.get("steps", 0)
        while True:
            inputs, targets = self.next_batch()
            self.optimizer.zero_grad()
            F.mse_loss(self.model(inputs), targets).backward()
            self.optimizer.step()
            steps += 1
            run.state["steps"] = steps
            if steps >= self.max_steps:
                break


trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), max_steps=13)
run.retry(trainer.fit)
result = {**trainer.model.state_dict(), "steps": torch.tensor(run.state["steps"])}
