"""Trains a small network on images, in the style of PyTorch's ImageNet example.

    torchrun --standalone --nproc-per-node=2 train.py --epochs 4

The images are in data.py. When started again, it resumes where it stopped.
"""

import argparse
import shutil
import time

import torch
import torch.distributed as dist
from data import Stripes
from torch import nn
from torch.utils.data import DataLoader

import elastic

parser = argparse.ArgumentParser(description="training on images")
parser.add_argument("-j", "--workers", default=0, type=int, help="data loading workers")
parser.add_argument("--epochs", default=4, type=int, help="epochs to run in total")
parser.add_argument("-b", "--batch-size", default=16, type=int, help="samples on each device")
parser.add_argument("--lr", default=0.1, type=float, help="initial learning rate")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=1e-4, type=float)
parser.add_argument("-p", "--print-freq", default=10, type=int)
parser.add_argument("--checkpoints", default="checkpoints", help="folder to save in")
parser.add_argument("--seed", default=0, type=int)
args = parser.parse_args()
run = elastic.join(checkpoints=args.checkpoints, when=10, seed=args.seed)


def main():
    torch.manual_seed(args.seed)
    layers = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
    model = run.wrap(nn.Sequential(*layers))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    run.track(optimizer=optimizer)

    train_dataset = Stripes(576, seed=1, augment=True)
    val_dataset = Stripes(100, seed=2, augment=False)
    train_loader = DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        num_workers=args.workers,
        shuffle=True,
    )
    train_loader = run.loader(train_loader)
    val_loader = run.shard(DataLoader(val_dataset, batch_size=args.batch_size))

    for epoch in run.epochs(args.epochs):
        adjust_learning_rate(optimizer, epoch)
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        best_acc1 = run.state.get("best_acc1", 0.0)
        is_best = acc1 > best_acc1
        run.state["best_acc1"] = best_acc1 = max(acc1, best_acc1)
        if dist.get_rank() == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
            }
            save_checkpoint(state, is_best)
    return model


def train(train_loader, model, criterion, optimizer, epoch):
    batch_time, losses, top1 = AverageMeter("Time"), AverageMeter("Loss"), AverageMeter("Acc@1")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader, start=train_loader.index):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}][{i}/{len(train_loader)}]", batch_time, losses, top1)


@torch.no_grad()
def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.eval()
    for images, target in val_loader:
        output = model(images)
        losses.update(criterion(output, target).item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
    losses.all_reduce()
    top1.all_reduce()
    if dist.get_rank() == 0:
        print(" *", losses, top1)
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class AverageMeter:
    """Computes and stores the average and the current value."""

    def __init__(self, name):
        self.name, self.val, self.sum, self.count, self.avg = name, 0.0, 0.0, 0, 0.0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count])
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {self.val:.4f} ({self.avg:.4f})"


def adjust_learning_rate(optimizer, epoch):
    """The initial learning rate, divided by 10 every 3 epochs."""
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * 0.1 ** (epoch // 3)


def accuracy(output, target):
    """In percent."""
    return 100.0 * (output.argmax(1) == target).double().mean().item()


if __name__ == "__main__":
    model = run.retry(main)
