"""A meter of each rank's own samples

With `local=True` an object belongs to one rank: it is rolled back with an interrupted step, and
never overwritten by another rank's. A joining rank begins with a new one, and a dead rank's part is
lost. `run.gather_states` collects all parts.

Group: Evaluation and logging
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


class Meter:
    def __init__(self):
        self.steps, self.samples, self.sum = [], 0, torch.zeros(())

    def update(self, step, values):
        self.steps.append(step)
        self.samples += len(values)
        self.sum += values.sum()

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
meter = Meter()
run.track(optimizer=optimizer)
run.track(meter=meter, local=True)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            meter.update(100 * epoch + i, torch.ones(len(inputs)))
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
repeated = len(meter.steps) - len(set(meter.steps))
torn = meter.samples - meter.sum
result = {**model.state_dict(), "repeated": torch.tensor(repeated), "torn": torn}
