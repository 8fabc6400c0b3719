"""DINO: a student, its teacher, and the centre of the teacher's outputs

The teacher is an average of the student, and the centre is a buffer of the loss: track both.
Schedules per iteration are indexed by `run.state`.

Group: Averages and state
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
images = torch.randn(96, 4)


class MultiCrop(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        return [images[index] + 0.1 * torch.randn(4) for _ in range(3)]  # two global views


class DINOLoss(nn.Module):
    def __init__(self, out_dim, nepochs, student_temp=0.1, center_momentum=0.9):
        super().__init__()
        self.student_temp = student_temp
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.teacher_temp_schedule = torch.linspace(0.04, 0.07, nepochs)

    def forward(self, student_output, teacher_output, epoch):
        student_out = (student_output / self.student_temp).chunk(3)
        temp = self.teacher_temp_schedule[epoch]
        teacher_out = F.softmax((teacher_output - self.center) / temp, dim=-1).detach().chunk(2)
        total_loss, n_loss_terms = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v == iq:
                    continue
                loss = torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1)
                total_loss += loss.mean()
                n_loss_terms += 1
        self.update_center(teacher_output)
        return total_loss / n_loss_terms

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        count = torch.tensor(float(len(teacher_output)))
        if dist.is_initialized():
            dist.all_reduce(batch_center)
            dist.all_reduce(count)  # shares may differ
        batch_center = batch_center / count
        momentum = self.center_momentum
        self.center = self.center * momentum + batch_center * (1 - momentum)


def cosine_scheduler(base_value, final_value, epochs, niter_per_ep):
    iters = torch.arange(epochs * niter_per_ep)
    cos = 1 + torch.cos(torch.pi * iters / len(iters))
    return (final_value + 0.5 * (base_value - final_value) * cos).tolist()


epochs = 2
run = elastic.join()
backbone = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8))
teacher = copy.deepcopy(backbone)
for p in teacher.parameters():
    p.requires_grad = False
student = run.wrap(backbone)
dino_loss = DINOLoss(8, epochs)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
data_loader = run.loader(DataLoader(MultiCrop(), batch_size=8, shuffle=True), global_batch=12)
run.track(optimizer=optimizer, teacher=teacher, dino_loss=dino_loss)
lr_schedule = cosine_scheduler(5e-3, 1e-4, epochs, len(data_loader))
wd_schedule = cosine_scheduler(0.04, 0.4, epochs, len(data_loader))
momentum_schedule = cosine_scheduler(0.9, 1, epochs, len(data_loader))


def train_one_epoch(epoch):
    for views in data_loader:
        it = run.state["it"]
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr_schedule[it]
            param_group["weight_decay"] = wd_schedule[it]
        teacher_output = teacher(torch.cat(views[:2]))
        student_output = student(torch.cat(views))
        loss = dino_loss(student_output, teacher_output, epoch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        with torch.no_grad():
            m = momentum_schedule[it]
            for param_q, param_k in zip(student.module.parameters(), teacher.parameters()):
                param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
        run.state["it"] += 1


def train():
    run.state.setdefault("it", 0)
    for epoch in run.epochs(epochs):
        train_one_epoch(epoch)


run.retry(train)
result = {**student.state_dict(), "center": dino_loss.center}
result |= {f"teacher.{name}": value for name, value in teacher.state_dict().items()}
