"""`run.commit()` in a loop over batches

The step ends there: an evaluation or a save that follows is no part of it. `at=` names the work
that is due by the state, so that it is done before the loop if a death has interrupted it.

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
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
run.track(optimizer=optimizer, scheduler=scheduler)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
run.state.update(step=0, due=0, evaluations=[], norm=0.0)


def evaluate():
    norm = sum(float(p.detach().norm()) for p in model.parameters())
    run.state["norm"] += run.mean(1.0, norm=norm)["norm"]
    run.state["evaluations"].append(run.state["due"])
    run.state["due"] = 0


def evaluate_if_due():
    if run.state["due"]:
        run.once("evaluate", evaluate, at=run.state["due"])


def train():
    evaluate_if_due()
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.state["step"] += 1
            if run.state["step"] % 3 == 0:
                run.state["due"] = run.state["step"]
            run.commit()
            run.log(**run.mean(len(inputs), loss=loss.detach()))
            evaluate_if_due()


run.retry(train)
result = {
    **model.state_dict(),
    "evaluations": torch.tensor(run.state["evaluations"]),
    "norm": torch.tensor(run.state["norm"]),
}
