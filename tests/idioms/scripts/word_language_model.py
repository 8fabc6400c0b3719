"""A hidden state carried from batch to batch

As in PyTorch's word_language_model: each column of a batch continues the same column of the
previous batch. The columns of a rank change with the world, so a buffer of the model holds the
state of all columns and is rolled back when a step is repeated. A local variable would restart from
zeros after a recovery, and would belong to other columns in another world.

Group: Data
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


bsz, bptt = 12, 5


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(11, 6), nn.LSTM(6, 8), nn.Linear(8, 11)
        self.register_buffer("hidden", torch.zeros(2, 1, bsz, 8))  # of all columns, on all ranks

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, 11), hidden


def carry_on(columns, hidden):
    everyones = torch.zeros_like(model.module.hidden)
    everyones[:, :, columns] = torch.stack(repackage_hidden(hidden))
    dist.all_reduce(everyones)
    model.module.hidden.copy_(everyones)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


text = torch.randint(0, 11, (12 * 41,))
columns = text.view(bsz, -1)
windows = torch.stack(
    [columns[:, i : i + bptt + 1] for i in range(0, 40, bptt)]
)  # step, column, time
dataset = TensorDataset(windows.flatten(0, 1))
run = elastic.join()
model = run.wrap(RNN())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=4), global_batch=bsz)


def train():
    for epoch in run.epochs(2):
        for step in run.steps(loader):
            (window,) = next(iter(step))
            columns = [index % bsz for index in step.indices]
            if step.index == 0:
                model.module.hidden.zero_()
            data, targets = window[:, :-1].t(), window[:, 1:].t().reshape(-1)
            model.zero_grad()
            output, hidden = model(data, tuple(model.module.hidden[:, :, columns]))
            carry_on(columns, hidden)
            loss = F.cross_entropy(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()


run.retry(train)
result = model.state_dict()
