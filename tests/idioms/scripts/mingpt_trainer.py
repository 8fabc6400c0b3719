"""minGPT's `Trainer`

An endless sampler, `next` inside `while`, and callbacks. `iter_num` is kept in `run.state`, because
an attribute that `run()` sets to 0 is reset by a recovery. The limit is checked before each step:
if a peer dies while ranks leave the loop, `run()` is called again.

Group: The loop
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()


class Trainer:
    def __init__(self, model, train_dataset):
        self.callbacks = defaultdict(list)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
        self.model = run.wrap(model)
        run.track(optimizer=self.optimizer)
        sampler = RandomSampler(train_dataset, replacement=True, num_samples=int(1e10))
        self.loader = run.loader(
            DataLoader(train_dataset, sampler=sampler, shuffle=False, batch_size=8), global_batch=12
        )

    def trigger_callbacks(self, name):
        for c in self.callbacks[name]:
            c(self)

    def run(self):
        self.model.train()
        self.iter_num = run.state.get("iter_num", 0)
        data_iter = iter(self.loader)
        while self.iter_num < 16:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(self.loader)
                batch = next(data_iter)
            inputs, targets = batch
            self.loss = F.mse_loss(self.model(inputs), targets)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            run.state["iter_num"] = self.iter_num


trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), dataset)
trainer.callbacks["on_batch_end"].append(
    lambda t: t.iter_num % 10 == 0 and print(t.iter_num, t.loss.item())
)
run.retry(trainer.run)
model = trainer.model
result = {**model.state_dict(), "iters": torch.tensor(run.state["iter_num"])}
