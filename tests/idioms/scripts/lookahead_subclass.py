"""Lookahead as an optimizer around another one, with a `state_dict` of its own form

As in `torch_optimizer`: it shares the groups of the other optimizer, and keeps slow weights in its
state. Track the outer one, whose methods save both.

Group: Optimizers and learning rates
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(48, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer, k=3, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        for group in self.param_groups:
            group["counter"] = 0

    def _parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _update(self, group):
        for fast in group["params"]:
            state = self.state[fast]
            if "slow" not in state:
                state["slow"] = fast.data.clone()
            state["slow"].add_(fast.data - state["slow"], alpha=self.alpha)
            fast.data.copy_(state["slow"])

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self._update(group)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        slow = {i: self.state[p] for i, p in enumerate(self._parameters())}
        return {"fast": self.optimizer.state_dict(), "slow": slow}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["fast"])
        for i, p in enumerate(self._parameters()):
            self.state[p] = state["slow"][i]


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = Lookahead(torch.optim.RAdam(model.parameters(), lr=0.02))
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
