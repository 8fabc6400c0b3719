"""One call of `run.retry` for each epoch

As in a trainer with a loop of its own: `is_last=False` saves no state at the end of each call. All
ranks make the same calls; on a node that joins later, those that others have completed do nothing.
`run.once` between the calls recovers by itself.

Group: The loop
"""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

EPOCHS, STEPS = 3, 5
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(60, 4)
y = x.sin().sum(1, keepdim=True)

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
run.state.update(step=0, norms=[], epochs=[])


def norm_of_weights():
    norm = run.mean(1.0, norm=sum(float(p.detach().norm()) for p in model.parameters()))["norm"]
    run.state["norms"].append(norm)
    return norm


def train(epoch):
    while run.state["step"] < (epoch + 1) * STEPS:
        if run.state["step"] % 2 == 0:
            run.once("examine", norm_of_weights)
        run.begin()
        first = 12 * (run.state["step"] % STEPS)
        rows = slice(first, first + 12)
        inputs = x[rows].chunk(run.world.size)[run.world.rank]
        targets = y[rows].chunk(run.world.size)[run.world.rank]
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        run.state["step"] += 1
        run.commit()
    run.once("examine", norm_of_weights)


for epoch in range(EPOCHS):
    run.retry(train, epoch, is_last=False)
    run.once("end of epoch", lambda: run.state["epochs"].append(epoch))

result = {
    **model.state_dict(),
    "norms": torch.tensor(run.state["norms"]),
    "epochs": torch.tensor(run.state["epochs"]),
}
