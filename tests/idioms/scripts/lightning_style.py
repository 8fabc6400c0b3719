"""A Lightning-style trainer

`training_step`, `configure_optimizers`, closures, and callbacks whose state is tracked.

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


class LitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.trainer.model(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y, reduction="sum"), len(x)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


class EarlyStopping:
    def __init__(self):
        self.best, self.wait = float("inf"), 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, s):
        vars(self).update(s)

    def on_validation_end(self, trainer, loss):
        self.wait = 0 if loss < self.best else self.wait + 1
        self.best = min(self.best, loss)
        trainer.should_stop = self.wait > 3


class Trainer:
    def __init__(self, max_epochs, callbacks):
        self.max_epochs, self.callbacks = max_epochs, callbacks
        self.should_stop = False

    def fit(self, lit, loader, val):
        object.__setattr__(lit, "trainer", self)
        self.lit = lit
        self.model = run.wrap(lit)
        self.optimizer, self.scheduler = lit.configure_optimizers()
        run.track(
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            **{type(c).__name__: c for c in self.callbacks},
        )
        self.loader, self.val = run.loader(loader, global_batch=12), run.shard(val)
        run.retry(self.fit_loop)

    def fit_loop(self):
        for _ in run.epochs(self.max_epochs):
            for batch_idx, batch in enumerate(self.loader, start=self.loader.index):

                def closure():
                    self.optimizer.zero_grad()
                    loss = self.lit.training_step(batch, batch_idx)
                    loss.backward()
                    return loss

                self.optimizer.step(closure)
            self.model.eval()
            with torch.no_grad():
                outs = [self.lit.validation_step(b, i) for i, b in enumerate(self.val)]
            self.model.train()
            n = sum(o[1] for o in outs)
            loss = run.mean(n, loss=sum(o[0].item() for o in outs) / max(n, 1))["loss"]
            self.scheduler.step(loss)
            for c in self.callbacks:
                c.on_validation_end(self, loss)
            if self.should_stop:
                break


run = elastic.join()
trainer = Trainer(3, [EarlyStopping()])
lit = LitModel()
trainer.fit(
    lit,
    DataLoader(dataset, batch_size=8, shuffle=True),
    DataLoader(TensorDataset(*dataset[:50]), batch_size=7),
)
result = {**trainer.model.state_dict(), "best": torch.tensor(trainer.callbacks[0].best)}
