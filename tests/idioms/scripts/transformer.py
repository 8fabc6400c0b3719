"""A small transformer with gradient clipping and warm-up"""

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
tokens = torch.randint(0, 13, (48, 8))
layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(13, 8), nn.Embedding(8, 8)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(8, 13)

    def forward(self, idx):
        t = idx.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        hidden = self.wte(idx) + self.wpe(torch.arange(t))
        return self.lm_head(self.blocks(hidden, mask=mask, is_causal=True))


model = run.wrap(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1.0, (it + 1) / 6))
run.track(optimizer=optimizer, scheduler=scheduler)
loader = run.loader(DataLoader(tokens, batch_size=2, shuffle=True), global_batch=6)


def train():
    for epoch in run.epochs(2):
        for batch in loader:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 13), batch[:, 1:].reshape(-1))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()


run.retry(train)
result = model.state_dict()
