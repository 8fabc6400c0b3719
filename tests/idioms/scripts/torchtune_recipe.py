"""A torchtune-style recipe with a per-token mean

Losses are averaged over ranks by sample count, but sequences differ in length. Dividing this rank's
token sum by the total number of tokens and by `step.share` gives every token the same weight.

Group: Gradients
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Recipe:
    def setup(self):
        self._model = run.wrap(nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.05)
        tokens = torch.randint(0, 11, (96, 6))
        lengths = torch.randint(2, 6, (96,))
        labels = tokens.roll(-1, 1).clone()
        labels[torch.arange(6)[None] >= lengths[:, None]] = -100
        self._dataloader = run.loader(
            DataLoader(TensorDataset(tokens, labels), batch_size=4, shuffle=True), global_batch=10
        )
        self._lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda s: max(0.1, 1 - s / 16)
        )
        run.track(optimizer=self._optimizer, scheduler=self._lr_scheduler)
        self.total_epochs = 2

    def train(self):
        self._optimizer.zero_grad()
        for curr_epoch in run.epochs(self.total_epochs):
            for step in run.steps(self._dataloader):
                ((tokens, labels),) = step
                num_tokens = (labels != -100).sum().double()
                logits = self._model(tokens)
                loss = F.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
                )
                dist.all_reduce(num_tokens)
                (loss / (num_tokens * step.share)).backward()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self._lr_scheduler.step()


run = elastic.join()
recipe = Recipe()
recipe.setup()
run.retry(recipe.train)
model = recipe._model
result = model.state_dict()
