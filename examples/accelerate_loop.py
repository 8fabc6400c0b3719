"""A classifier with Hugging Face Accelerate that survives the death of its nodes.

    torchrun --nproc-per-node=2 examples/accelerate_loop.py
    elastic run --nodes-local 3 --embedded-etcd --nnodes=2:3 examples/accelerate_loop.py /tmp/digits

Kill a node while it trains. The lines that differ from plain Accelerate are marked.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic  # elastic
from elastic.integrations.accelerate import ElasticAccelerator as Accelerator  # elastic

EPOCHS = 10


def main() -> None:
    run = elastic.join(checkpoints=sys.argv[1] if len(sys.argv) > 1 else None)  # elastic
    accelerator = Accelerator(run=run, gradient_accumulation_steps=2)

    torch.manual_seed(0)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    train_data, eval_data = torch.utils.data.random_split(data, [1500, 297])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.9)
    train_loader = DataLoader(train_data, batch_size=16, shuffle=True)
    eval_loader = DataLoader(eval_data, batch_size=16)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    def train() -> None:  # elastic
        for epoch in run.epochs(EPOCHS):  # elastic: instead of range(EPOCHS)
            model.train()
            for inputs, targets in train_loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

            model.eval()
            correct = 0
            for inputs, targets in eval_loader:
                with torch.no_grad():
                    predictions = model(inputs).argmax(-1)
                predictions, targets = accelerator.gather_for_metrics((predictions, targets))
                correct += int((predictions == targets).sum())
            accelerator.print(f"epoch {epoch}: accuracy {correct / len(eval_data):.3f}")

    run.retry(train)  # elastic
    accelerator.end_training()


if __name__ == "__main__":
    main()
