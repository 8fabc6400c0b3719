"""A contrastive loss over the global batch (CLIP)

`torch.distributed.nn` gathers the embeddings of all ranks, so that gradients flow through the
collective.

Group: Gradients
"""

import torch
import torch.distributed as dist
import torch.distributed.nn as distnn
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(4, 8), nn.Linear(1, 8)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.6592)

    def forward(self, image, text):
        images = F.normalize(self.image(image), dim=-1)
        texts = F.normalize(self.text(text), dim=-1)
        return images, texts, self.logit_scale.exp()


model = run.wrap(Clip())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def clip_loss(image, text, scale):
    if dist.get_world_size() > 1:
        image = torch.cat(distnn.all_gather(image), dim=0)
        text = torch.cat(distnn.all_gather(text), dim=0)
    logits = scale * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def train():
    for epoch in run.epochs(2):
        for images, texts in loader:
            loss = clip_loss(*model(images, texts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
