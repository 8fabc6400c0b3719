"""A classifier with Lightning Fabric that survives the death of its nodes.

    torchrun --nproc-per-node=2 examples/fabric_loop.py
    elastic run --nodes-local 3 --embedded-etcd --nnodes=2:3 examples/fabric_loop.py /tmp/digits

Kill a node while it trains. The lines that differ from plain Fabric are marked.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic  # elastic
from elastic.integrations.fabric import ElasticFabric as Fabric  # elastic

EPOCHS = 10


def main() -> None:
    run = elastic.join(checkpoints=sys.argv[1] if len(sys.argv) > 1 else None)  # elastic
    fabric = Fabric(run=run)
    fabric.launch()

    fabric.seed_everything(0)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    train_data, eval_data = torch.utils.data.random_split(data, [1500, 297])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, eval_loader = fabric.setup_dataloaders(
        DataLoader(train_data, batch_size=32, shuffle=True), DataLoader(eval_data, batch_size=32)
    )

    def train() -> None:  # elastic
        for epoch in run.epochs(EPOCHS):  # elastic: instead of range(EPOCHS)
            model.train()
            for inputs, targets in train_loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()

            model.eval()
            correct = torch.zeros((), dtype=torch.long, device=fabric.device)
            for inputs, targets in eval_loader:
                with torch.no_grad():
                    correct += (model(inputs).argmax(-1) == targets).sum()
            correct = fabric.all_reduce(correct, reduce_op="sum")
            fabric.print(f"epoch {epoch}: accuracy {int(correct) / len(eval_data):.3f}")

    run.retry(train)  # elastic


if __name__ == "__main__":
    main()
