"""Data-parallel training with snapshots, in the style of PyTorch's multi-GPU tutorial.

    torchrun --standalone --nproc-per-node=2 train.py 10 2

Ten epochs with a snapshot after every second one. A restart resumes from the last snapshot.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Regression(Dataset):
    """A linear function with noise, identical in every process."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 20, generator=generator)
        noise = torch.randn(size, 1, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + 0.1 * noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if snapshot_path.exists():
            self._load_snapshot(model)
        self.model = DDP(model)

    def _load_snapshot(self, model):
        snapshot = torch.load(self.snapshot_path)
        model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path)
        print(f"Epoch {epoch} | Snapshot saved at {self.snapshot_path}")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        batch_size, steps = len(next(iter(self.train_data))[0]), len(self.train_data)
        print(f"[{dist.get_rank()}] Epoch {epoch} | Batch size: {batch_size} | Steps: {steps}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if dist.get_rank() == 0 and (epoch + 1) % self.save_every == 0:
                self._save_snapshot(epoch)


def load_train_objs():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Regression(2048), model, optimizer


def prepare_dataloader(dataset, batch_size):
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))


def main(total_epochs, save_every, batch_size, snapshot_path):
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size)
    trainer = Trainer(model, train_data, optimizer, save_every, snapshot_path)
    trainer.train(total_epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="distributed training job")
    parser.add_argument("total_epochs", type=int, help="epochs to train")
    parser.add_argument("save_every", type=int, help="epochs between two snapshots")
    parser.add_argument("--batch_size", type=int, default=32, help="samples on each device")
    parser.add_argument("--snapshot_path", type=Path, default=Path("snapshot.pt"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    main(args.total_epochs, args.save_every, args.batch_size, args.snapshot_path)
    dist.destroy_process_group()
