"""Two models in one wrapper

Generator and discriminator are submodules of one module: one DDP and one gradient reduction per
step.

Group: Models
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


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.decoder = nn.Linear(3, 4)

    def forward(self, inputs):
        code = torch.tanh(self.encoder(inputs))
        return code, self.decoder(code)


model = run.wrap(Both())
enc_optimizer = torch.optim.Adam(model.module.encoder.parameters(), lr=0.01)
dec_optimizer = torch.optim.Adam(model.module.decoder.parameters(), lr=0.02)
run.track(encoder=enc_optimizer, decoder=dec_optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, _ in loader:
            code, output = model(inputs)
            loss = F.mse_loss(output, inputs) + 0.01 * code.pow(2).mean()
            enc_optimizer.zero_grad()
            dec_optimizer.zero_grad()
            loss.backward()
            enc_optimizer.step()
            dec_optimizer.step()


run.retry(train)
result = model.state_dict()
