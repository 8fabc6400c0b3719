"""PyTorch's ImageNet example

`run.retry` calls `main_worker`, which creates the model, optimizer, scheduler and loaders. The best
accuracy lives in `run.state`. A recovery resets the meters.

Group: The loop
"""

import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
out = tempfile.mkdtemp()


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch):
        print(
            self.prefix,
            f"[{batch}/{self.num_batches}]",
            *[f"{m.name} {m.avg:.3f}" for m in self.meters],
        )


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand(max(topk), -1))
        return [
            correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(target))
            for k in topk
        ]


def save_checkpoint(state, is_best):
    torch.save(state, f"{out}/checkpoint.pth.tar")
    if is_best:
        shutil.copyfile(f"{out}/checkpoint.pth.tar", f"{out}/model_best.pth.tar")


classes = (x.sum(1) > 0).long()
train_dataset, val_dataset = TensorDataset(x, classes), TensorDataset(x[:50], classes[:50])


def main_worker():
    global model
    torch.manual_seed(0)
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    run.track(optimizer=optimizer, scheduler=scheduler)
    train_loader = run.loader(
        DataLoader(train_dataset, batch_size=8, shuffle=True), global_batch=12
    )
    val_loader = run.shard(DataLoader(val_dataset, batch_size=8, shuffle=False))
    for epoch in run.epochs(2):
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        best_acc1 = run.state.get("best_acc1", 0.0)
        is_best = acc1 > best_acc1
        run.state["best_acc1"] = best_acc1 = max(acc1, best_acc1)
        if run.is_main:
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.module.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
            )


def train(train_loader, model, criterion, optimizer, epoch):
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    progress = ProgressMeter(len(train_loader), [losses, top1], prefix=f"Epoch: [{epoch}]")
    model.train()
    for i, (images, target) in enumerate(train_loader, start=train_loader.index):
        output = model(images)
        loss = criterion(output, target)
        acc1, _ = accuracy(output, target, topk=(1, 2))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 4 == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion):
    top1 = AverageMeter("Acc@1", ":6.2f")
    model.eval()
    with torch.no_grad():
        for i, (images, target) in enumerate(val_loader):
            top1.update(accuracy(model(images), target)[0][0].item(), images.size(0))
    top1.all_reduce()
    return top1.avg


run.retry(main_worker)
result = {**model.state_dict(), "best": torch.tensor(run.state["best_acc1"])}
