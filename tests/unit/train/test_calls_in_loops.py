"""However a loop calls what carries values from step to step, the values are found.

By a helper that gets a container, by a hook, a special method, a comprehension, a library.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from elastic.errors import TrainingError
from elastic.train import checks
from elastic.train.carried import refuse_carried

HEAD = """
from collections import defaultdict, deque
import torch
from torch import nn

network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
criterion = nn.MSELoss()
"""
# Each trains with values of the steps before.
CARRIED = {
    "helper appends to a passed queue": """
        def push(queue, x):
            queue.append(x.detach())
            if len(queue) > 3:
                queue.popleft()

        def train():
            q = deque()
            for x, y in loader:
                push(q, x)
                loss = criterion(network(x) + 0.1 * torch.stack(list(q)).mean(), y)
                loss.backward()
                optimizer.step()
    """,
    "helper updates a passed dict": """
        def update(ema, name, value):
            ema[name] = 0.9 * ema.get(name, 0.0) + 0.1 * value

        def train():
            ema = {}
            for x, y in loader:
                loss = criterion(network(x), y)
                update(ema, "loss", loss.item())
                (loss / ema["loss"]).backward()
                optimizer.step()
    """,
    "helper updates a global dict": """
        ema = {}

        def update(name, value):
            ema[name] = 0.9 * ema.get(name, 0.0) + 0.1 * value

        def train():
            for x, y in loader:
                loss = criterion(network(x), y)
                update("loss", loss.item())
                (loss / ema["loss"]).backward()
                optimizer.step()
    """,
    "alias of a container": """
        def train():
            memory = {"h": torch.zeros(4, 1)}
            state = memory
            for x, y in loader:
                out = network(x) + state["h"]
                state["h"] = out.detach()
                criterion(out, y).backward()
                optimizer.step()
    """,
    "tensor passed to a helper that changes it in place": """
        def decay(mean, x):
            mean.mul_(0.9).add_(x.mean(0), alpha=0.1)

        def train():
            mean = torch.zeros(2)
            for x, y in loader:
                decay(mean, x)
                criterion(network(x - mean), y).backward()
                optimizer.step()
    """,
    "object with a list passed": """
        class Buf:
            def __init__(self):
                self.items = []

        def push(buf, x):
            buf.items.append(x)

        def train():
            b = Buf()
            for x, y in loader:
                push(b, x)
                criterion(network(torch.cat(b.items[-2:]))[:4], y).backward()
                optimizer.step()
    """,
    "class with init given a list": """
        class Trainer:
            def __init__(self, history):
                self.history = history

            def step(self, x, y):
                loss = criterion(network(x), y)
                self.history.append(loss.item())
                (loss / max(self.history)).backward()
                optimizer.step()

        def train():
            history = []
            t = Trainer(history)
            for x, y in loader:
                t.step(x, y)
    """,
    "cleared only at times": """
        def train():
            parts = []
            for i, (x, y) in enumerate(loader):
                parts.append(x)
                criterion(network(parts[0]), y).backward()
                optimizer.step()
                if len(parts) > 3:
                    parts.clear()
    """,
    "parameter of the function": """
        def train2(queue):
            for x, y in loader:
                queue.append(x)
                criterion(network(queue[0]), y).backward()
                optimizer.step()

        q = []

        def train():
            train2(q)
    """,
    "metrics dict decides early stop": """
        def step(x, y, metrics):
            loss = criterion(network(x), y)
            loss.backward()
            optimizer.step()
            metrics["loss"] += loss.item()
            metrics["n"] += 1

        def train():
            metrics = defaultdict(float)
            for x, y in loader:
                step(x, y, metrics)
                if metrics["loss"] < 3:
                    break
    """,
    "gradient hook with a running norm in a dict": """
        history = {"norm": 1.0}

        def scale(g):
            history["norm"] = 0.9 * history["norm"] + 0.1 * g.norm().item()
            return g / history["norm"]

        for p in network.parameters():
            p.register_hook(scale)

        def train():
            for x, y in loader:
                loss = criterion(network(x), y)
                loss.backward()
                optimizer.step()
    """,
    "gradient hook with nonlocal": """
        def train():
            norm = 1.0

            def scale(g):
                nonlocal norm
                norm = 0.9 * norm + 0.1 * g.norm().item()
                return g / norm

            network[0].weight.register_hook(scale)
            for x, y in loader:
                loss = criterion(network(x), y)
                loss.backward()
                optimizer.step()
    """,
    "lambda hook reads what the loop changes": """
        scale = {"v": 1.0}
        network[0].weight.register_hook(lambda g: g * scale["v"])

        def train():
            for x, y in loader:
                loss = criterion(network(x), y)
                loss.backward()
                optimizer.step()
                scale["v"] *= 0.9
    """,
    "forward hook normalises by a running mean": """
        class Norm:
            def __init__(self):
                self.mean = 0.0

            def __call__(self, m, i, o):
                self.mean = 0.9 * self.mean + 0.1 * o.mean().item()
                return o - self.mean

        network[0].register_forward_hook(Norm())

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "pre-hook of a bound method": """
        class Noise:
            def __init__(self):
                self.n = 0

            def add(self, m, args):
                self.n += 1
                return (args[0] + 0.1 / self.n,)

        noise = Noise()
        network[0].register_forward_pre_hook(noise.add)

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "optimizer hook that decays the rate by its count": """
        calls = {"n": 0}

        def post(opt, args, kwargs):
            calls["n"] += 1
            for g in opt.param_groups:
                g["lr"] = 0.1 / (1 + calls["n"])

        optimizer.register_step_post_hook(post)

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "lambda called in the loop, with state of its own": """
        def train():
            ema = {"v": 0.0}
            smooth = lambda v: ema.update(v=0.9 * ema["v"] + 0.1 * v) or ema["v"]
            for x, y in loader:
                loss = criterion(network(x), y)
                (loss * smooth(loss.item())).backward()
                optimizer.step()
    """,
    "in-place in an expression": """
        def train():
            buf = torch.zeros(4, 2)
            for x, y in loader:
                z = buf.mul_(0.9).add_(x)
                criterion(network(z), y).backward()
                optimizer.step()
    """,
    "forward replaced at an epoch": """
        def train():
            for epoch in range(3):
                if epoch == 1:
                    network[1].forward = lambda x: x
                for x, y in loader:
                    criterion(network(x), y).backward()
                    optimizer.step()
    """,
    "forward of a script's module replaced at an epoch": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(2, 1)

            def forward(self, x):
                return self.a(x)

        net = Net()
        network = net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def other(x):
            return net.a(x) * 2

        def train():
            for epoch in range(3):
                if epoch == 1:
                    net.forward = other
                for x, y in loader:
                    criterion(net(x), y).backward()
                    optimizer.step()
    """,
    "script attribute function replaced": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(2, 1)
                self.act = torch.relu

            def forward(self, x):
                return self.act(self.a(x))

        net = Net()
        network = net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def train():
            for epoch in range(3):
                if epoch == 1:
                    net.act = torch.tanh
                for x, y in loader:
                    criterion(net(x), y).backward()
                    optimizer.step()
    """,
    "partial with state": """
        from functools import partial

        def smooth(state, v):
            state["v"] = 0.9 * state["v"] + 0.1 * v
            return state["v"]

        f = partial(smooth, {"v": 1.0})

        def train():
            for x, y in loader:
                loss = criterion(network(x), y)
                (loss / f(loss.item())).backward()
                optimizer.step()
    """,
    "super's method with state": """
        class Base:
            def __init__(self):
                self.n = 0

            def step(self):
                self.n += 1
                return 0.1 / self.n

        class Sub(Base):
            def step(self):
                return super().step() * 2

        s = Sub()

        def train():
            for x, y in loader:
                (criterion(network(x), y) * s.step()).backward()
                optimizer.step()
    """,
    "property of a state": """
        class Schedule:
            def __init__(self):
                self.n = 0

            def step(self):
                self.n += 1

            @property
            def temperature(self):
                return 1.0 / (1 + self.n)

        s = Schedule()

        def train():
            for x, y in loader:
                criterion(network(x) * s.temperature, y).backward()
                optimizer.step()
                s.step()
    """,
    "getitem of a script's class": """
        class Bank:
            def __init__(self):
                self.rows = {}

            def __getitem__(self, k):
                return self.rows.get(k, 0.0)

            def __setitem__(self, k, v):
                self.rows[k] = v

        b = Bank()

        def train():
            for x, y in loader:
                out = network(x)
                (criterion(out, y) + b["h"]).backward()
                optimizer.step()
                b["h"] = out.mean().item()
    """,
    "context manager with state": """
        class Scaled:
            def __init__(self):
                self.s = 1.0

            def __enter__(self):
                self.s *= 0.9
                return self

            def __exit__(self, *a):
                pass

        sc = Scaled()

        def train():
            for x, y in loader:
                with sc:
                    (criterion(network(x), y) * sc.s).backward()
                optimizer.step()
    """,
    "contextmanager function with state": """
        from contextlib import contextmanager

        st = {"s": 1.0}

        @contextmanager
        def scaled():
            st["s"] *= 0.9
            yield st["s"]

        def train():
            for x, y in loader:
                with scaled() as s:
                    (criterion(network(x), y) * s).backward()
                optimizer.step()
    """,
    "default argument as state": """
        def smooth(v, cache=[0.0]):
            cache[0] = 0.9 * cache[0] + 0.1 * v
            return cache[0]

        def train():
            for x, y in loader:
                loss = criterion(network(x), y)
                (loss / smooth(loss.item())).backward()
                optimizer.step()
    """,
    "iterator class of the script": """
        class Temps:
            def __init__(self):
                self.t = 1.0

            def __iter__(self):
                return self

            def __next__(self):
                self.t *= 0.9
                return self.t

        temps = Temps()

        def train():
            for x, y in loader:
                (criterion(network(x), y) * next(temps)).backward()
                optimizer.step()
    """,
    "zip with own iterator": """
        class Temps:
            def __init__(self):
                self.t = 1.0

            def __iter__(self):
                return self

            def __next__(self):
                self.t *= 0.9
                return self.t

        temps = Temps()

        def train():
            for (x, y), t in zip(loader, temps):
                (criterion(network(x), y) * t).backward()
                optimizer.step()
    """,
    "classmethod state": """
        class S:
            v = 1.0

            @classmethod
            def smooth(cls, x):
                cls.v = 0.9 * cls.v + 0.1 * x
                return cls.v

        def train():
            for x, y in loader:
                loss = criterion(network(x), y)
                (loss / S.smooth(loss.item())).backward()
                optimizer.step()
    """,
    "comprehension calls a function with state": """
        st = {"v": 1.0}

        def smooth(v):
            st["v"] = 0.9 * st["v"] + 0.1 * v
            return st["v"]

        def train():
            for x, y in loader:
                out = network(x)
                losses = [criterion(out, y), out.abs().mean()]
                sum([l / smooth(l.item()) for l in losses]).backward()
                optimizer.step()
    """,
    "map with a function with state": """
        st = {"v": 1.0}

        def smooth(v):
            st["v"] = 0.9 * st["v"] + 0.1 * float(v)
            return st["v"]

        def train():
            for x, y in loader:
                out = network(x)
                losses = [criterion(out, y), out.abs().mean()]
                (losses[0] * sum(map(smooth, losses))).backward()
                optimizer.step()
    """,
    "replay buffer class with len and sampling": """
        import random

        class Replay:
            def __init__(self):
                self.items = []

            def __len__(self):
                return len(self.items)

            def push(self, x):
                self.items.append(x)

            def sample(self):
                return random.choice(self.items)

        r = Replay()

        def train():
            for x, y in loader:
                r.push(x)
                if len(r) > 0:
                    criterion(network(r.sample()), y).backward()
                    optimizer.step()
    """,
    "setattr": """
        class S:
            pass

        s = S()
        s.v = 1.0

        def train():
            for x, y in loader:
                (criterion(network(x), y) * s.v).backward()
                optimizer.step()
                setattr(s, "v", s.v * 0.9)
    """,
    "getattr read": """
        class S:
            pass

        s = S()
        s.v = 1.0

        def train():
            for x, y in loader:
                (criterion(network(x), y) * getattr(s, "v")).backward()
                optimizer.step()
                s.v *= 0.9
    """,
    "compiled module with a tensor of its own": """
        class C(nn.Module):
            def __init__(self):
                super().__init__()
                self.center = torch.zeros(1)

            def forward(self, o):
                self.center = 0.9 * self.center + 0.1 * o.detach().mean()
                return o - self.center

        c = torch.compile(C(), backend="eager")

        def train():
            for x, y in loader:
                criterion(c(network(x)), y).backward()
                optimizer.step()
    """,
    "out=": """
        def train():
            m = torch.zeros(2)
            for x, y in loader:
                torch.lerp(m, x.mean(0), 0.1, out=m)
                criterion(network(x - m), y).backward()
                optimizer.step()
    """,
    "foreach": """
        def train():
            bufs = [torch.zeros(2)]
            for x, y in loader:
                torch._foreach_mul_(bufs, 0.9)
                torch._foreach_add_(bufs, [x.mean(0)])
                criterion(network(x - bufs[0]), y).backward()
                optimizer.step()
    """,
    "list of meters in a loop": """
        class Meter:
            def __init__(self):
                self.avg = 0.0

            def update(self, v):
                self.avg = 0.9 * self.avg + 0.1 * v

        meters = [Meter(), Meter()]

        def train():
            for x, y in loader:
                out = network(x)
                losses = [criterion(out, y), out.abs().mean()]
                total = 0
                for m, l in zip(meters, losses):
                    m.update(l.item())
                    total = total + l / (1 + m.avg)
                total.backward()
                optimizer.step()
    """,
    "meters updated in a comprehension": """
        class Meter:
            def __init__(self):
                self.avg = 0.0

            def update(self, v):
                self.avg = 0.9 * self.avg + 0.1 * v
                return self.avg

        meters = [Meter(), Meter()]

        def train():
            for x, y in loader:
                out = network(x)
                losses = [criterion(out, y), out.abs().mean()]
                sum(l / (1 + m.update(l.item())) for m, l in zip(meters, losses)).backward()
                optimizer.step()
    """,
    "queue of a class with slots": """
        class Ring:
            __slots__ = ("buf", "i")

            def __init__(self):
                self.buf = [torch.zeros(4, 2)] * 2
                self.i = 0

            def push(self, x):
                self.buf[self.i % 2] = x
                self.i += 1

        r = Ring()

        def train():
            for x, y in loader:
                r.push(x)
                criterion(network(r.buf[0] + r.buf[1]), y).backward()
                optimizer.step()
    """,
    "callback object with on_step": """
        class Decay:
            def on_step(self, opt, step):
                for g in opt.param_groups:
                    g["lr"] *= 0.99

        class Temp:
            def __init__(self):
                self.t = 1.0

            def on_step(self, opt, step):
                self.t *= 0.9

        temp = Temp()

        class Loop:
            def __init__(self, cbs):
                self.cbs = cbs

            def fire(self, name, *a):
                for cb in self.cbs:
                    getattr(cb, name)(*a)

            def run(self):
                for i, (x, y) in enumerate(loader):
                    (criterion(network(x), y) * temp.t).backward()
                    optimizer.step()
                    self.fire("on_step", optimizer, i)

        def train():
            Loop([Decay(), temp]).run()
    """,
    "early stopping class by property": """
        class Stopper:
            def __init__(self, patience):
                self.best, self.bad, self.patience = 1e9, 0, patience

            def step(self, v):
                if v < self.best:
                    self.best, self.bad = v, 0
                else:
                    self.bad += 1

            @property
            def stop(self):
                return self.bad >= self.patience

        s = Stopper(2)

        def train():
            for epoch in range(5):
                total = 0.0
                for x, y in loader:
                    loss = criterion(network(x), y)
                    loss.backward()
                    optimizer.step()
                    total += loss.item()
                s.step(total)
                if s.stop:
                    break
    """,
    "moco queue in a class": """
        class Queue:
            def __init__(self):
                self.q = torch.zeros(8, 1)
                self.ptr = 0

            @torch.no_grad()
            def push(self, k):
                n = len(k)
                self.q[self.ptr : self.ptr + n] = k
                self.ptr = (self.ptr + n) % 8

        q = Queue()

        def train():
            for x, y in loader:
                out = network(x)
                (criterion(out, y) - (out.mean() * q.q.mean())).backward()
                optimizer.step()
                q.push(out.detach())
    """,
    "loss balancing by ratios of the last losses": """
        class DWA:
            def __init__(self):
                self.prev = None

            def weights(self, losses):
                now = [l.item() for l in losses]
                w = (
                    [1.0, 1.0]
                    if self.prev is None
                    else [a / (b + 1e-8) for a, b in zip(now, self.prev)]
                )
                self.prev = now
                return w

        d = DWA()

        def train():
            for x, y in loader:
                out = network(x)
                ls = [criterion(out, y), out.abs().mean()]
                sum(w * l for w, l in zip(d.weights(ls), ls)).backward()
                optimizer.step()
    """,
    "generator image pool as in CycleGAN": """
        import random

        class ImagePool:
            def __init__(self, n):
                self.n, self.images = n, []

            def query(self, x):
                if len(self.images) < self.n:
                    self.images.append(x)
                    return x
                i = random.randrange(self.n)
                old, self.images[i] = self.images[i], x
                return old

        pool = ImagePool(2)

        def train():
            for x, y in loader:
                criterion(network(pool.query(x)), y).backward()
                optimizer.step()
    """,
    "snapshots by step averaged into the network": """
        import copy

        def train():
            snaps = []
            for epoch in range(3):
                for i, (x, y) in enumerate(loader):
                    criterion(network(x), y).backward()
                    optimizer.step()
                    if i % 10 == 0:
                        snaps.append([p.detach().clone() for p in network.parameters()])
            with torch.no_grad():
                for j, p in enumerate(network.parameters()):
                    p.copy_(torch.stack([s[j] for s in snaps]).mean(0))
    """,
    "manual sgd, sub_": """
        def train():
            lr = 0.1
            for x, y in loader:
                criterion(network(x), y).backward()
                with torch.no_grad():
                    for p in network.parameters():
                        p.sub_(lr * p.grad)
                        p.grad.zero_()
                lr *= 0.99
    """,
    "manual sgd, augmented": """
        def train():
            lr = 0.1
            for x, y in loader:
                criterion(network(x), y).backward()
                with torch.no_grad():
                    for p in network.parameters():
                        p -= lr * p.grad
                        p.grad = None
                lr *= 0.99
    """,
    "noise on weights with a decaying scale": """
        def train():
            s = 0.1
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for name, p in network.named_parameters():
                        p.add_(torch.randn_like(p) * s)
                s *= 0.99
    """,
    "decay by foreach": """
        params = list(network.parameters())

        def train():
            s = 0.1
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    torch._foreach_mul_(params, 1 - s)
                s *= 0.99
    """,
    "init from function with vector_to_parameters": """
        from torch.nn.utils import parameters_to_vector, vector_to_parameters

        def train():
            v = torch.zeros(33)
            for x, y in loader:
                criterion(network(x), y).backward()
                g = torch.cat([p.grad.flatten() for p in network.parameters()])
                v = 0.9 * v + g
                vector_to_parameters(
                    parameters_to_vector(network.parameters()) - 0.1 * v, network.parameters()
                )
    """,
    "norm of a list before the loop": """
        params = [p for p in network.parameters()]

        def train():
            norm = sum(p.norm().item() for p in params)
            for i, (x, y) in enumerate(loader):
                (criterion(network(x), y) / norm).backward()
                optimizer.step()
    """,
    "manual sgd on own parameters": """
        w = nn.Parameter(torch.zeros(2, 1))

        def train():
            lr = 0.1
            for x, y in loader:
                loss = criterion(network(x), y)
                loss.backward()
                with torch.no_grad():
                    for group in optimizer.param_groups:
                        for p in group["params"]:
                            p.add_(p.grad, alpha=-lr)
                            p.grad = None
                lr *= 0.99
    """,
    "weights by state dict": """
        def train():
            s = 1.0
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for k, v in network.state_dict().items():
                        v.mul_(s)
                s *= 0.999
    """,
    "group setting by variable key": """
        key = "lr"

        def train():
            lr = 0.1
            for x, y in loader:
                for g in optimizer.param_groups:
                    g[key] = lr
                criterion(network(x), y).backward()
                optimizer.step()
                lr *= 0.99
    """,
    "loss weight in criterion object of torch": """
        crit = nn.SmoothL1Loss(beta=1.0)

        def train():
            for x, y in loader:
                crit(network(x), y).backward()
                optimizer.step()
                crit.beta *= 0.99
    """,
    "weight tensor of a criterion": """
        crit = nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))

        def train():
            for x, y in loader:
                crit(network(x), y).backward()
                optimizer.step()
                crit.pos_weight.mul_(0.99)
    """,
    "per-layer rates that decay": """
        rates = [0.1, 0.05, 0.1, 0.05]

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                with torch.no_grad():
                    for i, p in enumerate(network.parameters()):
                        p.sub_(rates[i] * p.grad)
                        p.grad = None
                        rates[i] *= 0.99
    """,
    "tensor add returns": """
        def train():
            s = 1.0
            for x, y in loader:
                loss = criterion(network(x), y).mul(1.0).add(network[0].weight.norm() * s)
                loss.backward()
                optimizer.step()
                s *= 0.9
    """,
    "a list outside of the function, emptied last": """
        acts = []
        network[0].register_forward_hook(lambda m, i, o: acts.append(o))

        def train():
            for x, y in loader:
                (criterion(network(x), y) + acts[0].abs().mean()).backward()
                optimizer.step()
                acts.clear()
    """,
}
# Values of this step, values that nothing changes, and what is only reported.
ACCEPTED = {
    "helper clears what it fills": """
        def collect(out, x):
            out.clear()
            out.append(x)

        def train():
            parts = []
            for x, y in loader:
                collect(parts, x)
                criterion(network(parts[0]), y).backward()
                optimizer.step()
    """,
    "helper fills list created in the loop": """
        def collect(out, x):
            out.append(x)

        def train():
            for x, y in loader:
                parts = []
                collect(parts, x)
                criterion(network(parts[0]), y).backward()
                optimizer.step()
    """,
    "helper logs losses": """
        def log(history, loss):
            history.append(loss.item())

        def train():
            history = []
            for x, y in loader:
                loss = criterion(network(x), y)
                loss.backward()
                optimizer.step()
                log(history, loss)
    """,
    "appended, used, cleared at the end": """
        def train():
            parts = []
            for x, y in loader:
                parts.append(x)
                criterion(network(parts[0]), y).backward()
                optimizer.step()
                parts.clear()
    """,
    "helper fills a dict by constant keys": """
        def fill(out, x):
            out["h"] = network(x)

        def train():
            out = {}
            for x, y in loader:
                fill(out, x)
                criterion(out["h"], y).backward()
                optimizer.step()
    """,
    "metrics dict filled in helper and printed": """
        def step(x, y, metrics):
            loss = criterion(network(x), y)
            loss.backward()
            optimizer.step()
            metrics["loss"] += loss.item()
            metrics["n"] += 1

        def train():
            metrics = defaultdict(float)
            for x, y in loader:
                step(x, y, metrics)
            print(metrics["loss"] / metrics["n"])
    """,
    "buffer reused in place": """
        def train():
            buf = torch.zeros(4, 2)
            for x, y in loader:
                buf.copy_(x)
                criterion(network(buf), y).backward()
                optimizer.step()
    """,
    "clamp hook": """
        for p in network.parameters():
            p.register_hook(lambda g: g.clamp(-1, 1))

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "mask hook": """
        mask = torch.ones(8, 2)
        network[0].weight.register_hook(lambda g: g * mask)

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "outputs of a layer, dropped in each step of each epoch": """
        def train():
            acts = []
            network[0].register_forward_hook(lambda m, i, o: acts.append(o))
            for epoch in range(2):
                for x, y in loader:
                    loss = criterion(network(x), y) + acts[0].abs().mean()
                    loss.backward()
                    optimizer.step()
                    acts.clear()
    """,
    "features of layers, by name": """
        feats = {}

        def save(name):
            def hook(m, i, o):
                feats[name] = o

            return hook

        for n, m in network.named_modules():
            if n:
                m.register_forward_hook(save(n))

        def train():
            for x, y in loader:
                out = network(x)
                (criterion(out, y) + feats["0"].pow(2).mean()).backward()
                optimizer.step()
    """,
    "features of layers, all values": """
        feats = {}

        def save(name):
            def hook(m, i, o):
                feats[name] = o

            return hook

        for n, m in network.named_modules():
            if n:
                m.register_forward_hook(save(n))

        def train():
            for x, y in loader:
                out = network(x)
                (criterion(out, y) + sum(f.pow(2).mean() for f in feats.values())).backward()
                optimizer.step()
    """,
    "features by module": """
        feats = {}

        def hook(m, i, o):
            feats[m] = o

        network[0].register_forward_hook(hook)

        def train():
            for x, y in loader:
                out = network(x)
                (criterion(out, y) + feats[network[0]].pow(2).mean()).backward()
                optimizer.step()
    """,
    "list of features cleared first": """
        acts = []
        network[0].register_forward_hook(lambda m, i, o: acts.append(o))

        def train():
            for x, y in loader:
                acts.clear()
                out = network(x)
                (criterion(out, y) + acts[0].pow(2).mean()).backward()
                optimizer.step()
    """,
    "activation statistics printed": """
        stats = defaultdict(list)

        def hook(m, i, o):
            stats["0"].append(o.std().item())

        network[0].register_forward_hook(hook)

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
            print(stats)
    """,
    "extractor with hooks on a frozen net": """
        class Extractor(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net = net
                self.out = {}
                for i, layer in enumerate(net):
                    layer.register_forward_hook(self.hook(i))

            def hook(self, i):
                def f(m, inp, out):
                    self.out[i] = out

                return f

            def forward(self, x):
                self.net(x)
                return [self.out[0], self.out[2]]

        vgg = Extractor(
            nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2)).requires_grad_(False)
        )

        def train():
            for x, y in loader:
                out = network(x)
                a, b = vgg(out), vgg(y)
                loss = criterion(out, y) + sum(criterion(p, q) for p, q in zip(a, b))
                loss.backward()
                optimizer.step()
    """,
    "optimizer hook that counts for a report": """
        calls = {"n": 0}

        def post(opt, args, kwargs):
            calls["n"] += 1

        optimizer.register_step_post_hook(post)

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
            print(calls)
    """,
    "nan check hook": """
        def check(m, i, o):
            if torch.isnan(o).any():
                raise RuntimeError(f"nan in {m}")

        for m in network.modules():
            m.register_forward_hook(check)

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "module backward hook counts": """
        norms = []

        def hook(m, gi, go):
            norms.append(go[0].norm().item())

        network[0].register_full_backward_hook(hook)

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
            print(norms[-1])
    """,
    "dropout changed at an epoch": """
        drop = nn.Dropout(0.1)
        network.append(drop)

        def train():
            for epoch in range(3):
                if epoch == 1:
                    drop.p = 0.0
                for x, y in loader:
                    criterion(network(x), y).backward()
                    optimizer.step()
    """,
    "forward patched once before the loop": """
        def train():
            network[1].forward = lambda x: x
            for epoch in range(3):
                for x, y in loader:
                    criterion(network(x), y).backward()
                    optimizer.step()
    """,
    "property without changes": """
        class Schedule:
            def __init__(self):
                self.n = 0

            @property
            def temperature(self):
                return 1.0 / (1 + self.n)

        s = Schedule()

        def train():
            for x, y in loader:
                criterion(network(x) * s.temperature, y).backward()
                optimizer.step()
    """,
    "lru_cache of a helper": """
        import functools

        @functools.lru_cache
        def mask(n):
            return torch.ones(n, 1)

        def train():
            for x, y in loader:
                criterion(network(x) * mask(4), y).backward()
                optimizer.step()
    """,
    "contextmanager around a step, no state": """
        from contextlib import contextmanager

        @contextmanager
        def timed(name):
            import time

            t = time.time()
            try:
                yield
            finally:
                print(name, time.time() - t)

        def train():
            for x, y in loader:
                with timed("step"):
                    loss = criterion(network(x), y)
                    loss.backward()
                optimizer.step()
    """,
    "with around the loop": """
        from contextlib import contextmanager

        @contextmanager
        def job(name):
            print("begin", name)
            yield name
            print("end", name)

        def train():
            with job("a"), job("b") as b:
                for x, y in loader:
                    criterion(network(x), y).backward()
                    optimizer.step()
    """,
    "timer class": """
        import time

        class Timer:
            def __init__(self):
                self.total = 0.0

            def __enter__(self):
                self.t = time.time()
                return self

            def __exit__(self, *a):
                self.total += time.time() - self.t

        timer = Timer()

        def train():
            for x, y in loader:
                with timer:
                    criterion(network(x), y).backward()
                optimizer.step()
            print(timer.total)
    """,
    "averaged meters by property": """
        class Meter:
            def __init__(self):
                self.sum = 0.0
                self.n = 0

            def update(self, v):
                self.sum += v
                self.n += 1

            @property
            def avg(self):
                return self.sum / self.n

        m = Meter()

        def train():
            for i, (x, y) in enumerate(loader):
                loss = criterion(network(x), y)
                loss.backward()
                optimizer.step()
                m.update(loss.item())
                if i % 10 == 0:
                    print(m.avg)
    """,
    "checkpointed block": """
        from torch.utils.checkpoint import checkpoint

        def block(x):
            return network[1](network[0](x))

        def train():
            for x, y in loader:
                h = checkpoint(block, x, use_reentrant=False)
                criterion(network[2](h), y).backward()
                optimizer.step()
    """,
    "closure for LBFGS": """
        def train():
            batch = {}

            def closure():
                optimizer.zero_grad()
                loss = criterion(network(batch["x"]), batch["y"])
                loss.backward()
                return loss

            for x, y in loader:
                batch["x"], batch["y"] = x, y
                optimizer.step(closure)
    """,
    "comprehension variable named as the batch": """
        def f(x):
            return x * 2

        def train():
            for x, y in loader:
                parts = [f(x) for x in x.split(2)]
                criterion(network(torch.cat(parts)), y).backward()
                optimizer.step()
    """,
    "comprehension over pairs": """
        def reg(n, p):
            return p.abs().sum() * 0.001

        def train():
            for x, y in loader:
                loss = criterion(network(x), y)
                loss = loss + sum(reg(n, p) for n, p in network.named_parameters() if p.dim() > 1)
                loss.backward()
                optimizer.step()
    """,
    "partial of a loss": """
        from functools import partial

        def weighted(a, b, w):
            return criterion(a, b) * w

        crit = partial(weighted, w=2.0)

        def train():
            for x, y in loader:
                crit(network(x), y).backward()
                optimizer.step()
    """,
    "a prefetcher that holds the next batch": """
        class Prefetcher:
            def __init__(self, loader):
                self.loader = loader

            def __iter__(self):
                self.it = iter(self.loader)
                self.preload()
                return self

            def preload(self):
                try:
                    self.next = next(self.it)
                except StopIteration:
                    self.next = None

            def __next__(self):
                batch = self.next
                if batch is None:
                    raise StopIteration
                self.preload()
                return batch

        def train():
            for x, y in Prefetcher(loader):
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "a transform of batches with next": """
        class ToDevice:
            def __init__(self, loader):
                self.loader = loader

            def __iter__(self):
                self.it = iter(self.loader)
                return self

            def __next__(self):
                x, y = next(self.it)
                return x.float(), y.float()

        def train():
            batches = ToDevice(loader)
            for x, y in batches:
                criterion(network(x), y).backward()
                optimizer.step()
    """,
    "clip of a list of parameters": """
        params = [p for p in network.parameters() if p.requires_grad]

        def train():
            for i, (x, y) in enumerate(loader):
                loss = criterion(network(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(params, 1.0)
                torch._foreach_mul_([p.grad for p in params], 0.5)
                optimizer.step()
    """,
    "gradients scaled in place by foreach": """
        def train():
            for i, (x, y) in enumerate(loader):
                loss = criterion(network(x), y)
                loss.backward()
                grads = [p.grad for p in network.parameters()]
                torch._foreach_mul_(grads, 0.5)
                optimizer.step()
    """,
    "trainer class as in tutorials": """
        class Trainer:
            def __init__(self, model, opt, loader):
                self.model, self.opt, self.loader = model, opt, loader
                self.losses, self.epoch = [], 0

            def run_batch(self, x, y):
                self.opt.zero_grad()
                loss = criterion(self.model(x), y)
                loss.backward()
                self.opt.step()
                return loss.item()

            def run_epoch(self, epoch):
                self.losses.clear()
                for x, y in self.loader:
                    self.losses.append(self.run_batch(x, y))
                print(epoch, sum(self.losses) / len(self.losses))

            def train(self, n):
                for epoch in range(n):
                    self.run_epoch(epoch)

        def train():
            Trainer(network, optimizer, loader).train(2)
    """,
    "moving average printed via property and f-string": """
        class Smooth:
            def __init__(self):
                self.d = deque(maxlen=20)
                self.total = 0.0

            def update(self, v):
                self.d.append(v)
                self.total += v

            @property
            def median(self):
                return sorted(self.d)[len(self.d) // 2]

            def __str__(self):
                return f"{self.median:.3f}"

        class Logger:
            def __init__(self):
                self.meters = defaultdict(Smooth)

            def update(self, **kw):
                for k, v in kw.items():
                    self.meters[k].update(v)

            def __str__(self):
                return " ".join(f"{k}: {m}" for k, m in self.meters.items())

            def every(self, it, n):
                i = 0
                for obj in it:
                    yield obj
                    if i % n == 0:
                        print(str(self))
                    i += 1

        def train():
            logger = Logger()
            for x, y in logger.every(loader, 10):
                loss = criterion(network(x), y)
                loss.backward()
                optimizer.step()
                logger.update(loss=loss.item())
    """,
    "reported gradient norms via hooks, cleared each epoch": """
        norms = []
        for p in network.parameters():
            p.register_hook(lambda g: norms.append(g.norm().item()))

        def train():
            for epoch in range(2):
                norms.clear()
                for x, y in loader:
                    criterion(network(x), y).backward()
                    optimizer.step()
                print(sum(norms))
    """,
    "validation metric object with reset": """
        class Acc:
            def __init__(self):
                self.reset()

            def reset(self):
                self.n = self.k = 0

            def update(self, p, y):
                self.n += len(y)
                self.k += int((p.sign() == y.sign()).sum())

            def compute(self):
                return self.k / self.n

        acc = Acc()

        def evaluate():
            acc.reset()
            for x, y in [(torch.ones(4, 2), torch.ones(4, 1))]:
                acc.update(network(x), y)
            return acc.compute()

        def train():
            for epoch in range(2):
                for x, y in loader:
                    criterion(network(x), y).backward()
                    optimizer.step()
                print(evaluate())
    """,
    "best loss kept and printed": """
        class Best:
            def __init__(self):
                self.v = 1e9

            def update(self, v):
                improved = v < self.v
                self.v = min(self.v, v)
                return improved

        b = Best()

        def train():
            for epoch in range(2):
                for x, y in loader:
                    loss = criterion(network(x), y)
                    loss.backward()
                    optimizer.step()
                if b.update(loss.item()):
                    print("new best")
    """,
    "ppo buffer filled and cleared within an iteration": """
        class Buffer:
            def __init__(self):
                self.x, self.y = [], []

            def add(self, x, y):
                self.x.append(x)
                self.y.append(y)

            def batches(self):
                for i in range(len(self.x)):
                    yield self.x[i], self.y[i]

            def clear(self):
                self.x.clear()
                self.y.clear()

        buf = Buffer()

        def train():
            for x, y in loader:
                buf.clear()
                for i in range(2):
                    buf.add(x * (i + 1), y)
                for a, b in buf.batches():
                    criterion(network(a), b).backward()
                optimizer.step()
    """,
    "meter dict as in timm": """
        class AverageMeter:
            def __init__(self):
                self.reset()

            def reset(self):
                self.val = self.avg = self.sum = self.count = 0

            def update(self, val, n=1):
                self.val = val
                self.sum += val * n
                self.count += n
                self.avg = self.sum / self.count

        def train():
            for epoch in range(2):
                m = {"loss": AverageMeter(), "norm": AverageMeter()}
                for i, (x, y) in enumerate(loader):
                    loss = criterion(network(x), y)
                    loss.backward()
                    norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    m["loss"].update(loss.item(), len(x))
                    m["norm"].update(norm.item())
                    if i % 50 == 0:
                        print(" ".join(f"{k} {v.avg:.3f}" for k, v in m.items()))
    """,
    "class with cached mask": """
        class Mask:
            def __init__(self):
                self.m = None

            def get(self, n):
                if self.m is None or self.m.shape[0] != n:
                    self.m = torch.ones(n, 1)
                return self.m

        mk = Mask()

        def train():
            for x, y in loader:
                criterion(network(x) * mk.get(len(x)), y).backward()
                optimizer.step()
    """,
    "gradient accumulation by own counter": """
        class Acc:
            def __init__(self, k):
                self.k, self.i = k, 0

            def ready(self):
                self.i += 1
                return self.i % self.k == 0

        acc = Acc(2)

        def train():
            for x, y in loader:
                (criterion(network(x), y) / 2).backward()
                if acc.ready():
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    "weight normalised": """
        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    network[0].weight.div_(network[0].weight.norm())
    """,
    "clamp": """
        def train():
            for i, (x, y) in enumerate(loader):
                criterion(network(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for p in network.parameters():
                        p.clamp_(-1, 1)
    """,
    "list of parameters scaled and clipped": """
        params = [p for p in network.parameters()]

        def train():
            for i, (x, y) in enumerate(loader):
                criterion(network(x), y).backward()
                nn.utils.clip_grad_norm_(params, 1.0)
                optimizer.step()
                with torch.no_grad():
                    torch._foreach_mul_(params, 0.999)
                total = sum(p.norm().item() for p in params)
                print(total > 0)
    """,
    "manual sgd with a rate of the epoch": """
        def train():
            for epoch in range(3):
                lr = 0.1 * 0.5**epoch
                for x, y in loader:
                    criterion(network(x), y).backward()
                    with torch.no_grad():
                        for p in network.parameters():
                            p -= lr * p.grad
                            p.grad = None
    """,
    "losses summed and printed beside manual sgd": """
        def train():
            total = 0.0
            for x, y in loader:
                loss = criterion(network(x), y)
                loss.backward()
                total += loss.item()
                with torch.no_grad():
                    for p in network.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
            print(total)
    """,
    "dropout by attribute in the loop": """
        network.insert(1, nn.Dropout(0.5))

        def train():
            for epoch in range(3):
                network[1].p = 0.5 / (epoch + 1)
                for x, y in loader:
                    criterion(network(x), y).backward()
                    optimizer.step()
    """,
    "norms monitored beside manual sgd": """
        from itertools import count

        monitors = [[] for _ in network.parameters()]

        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                with torch.no_grad():
                    for p, m in zip(network.parameters(), monitors):
                        m.append(p.grad.norm().item())
                        p.sub_(0.1 * p.grad)
                        p.grad = None
            print(len(monitors[0]))
    """,
    "sam by hand": """
        def train():
            for x, y in loader:
                criterion(network(x), y).backward()
                with torch.no_grad():
                    eps = [0.05 * p.grad for p in network.parameters()]
                    for p, e in zip(network.parameters(), eps):
                        p.add_(e)
                optimizer.zero_grad()
                criterion(network(x), y).backward()
                with torch.no_grad():
                    for p, e in zip(network.parameters(), eps):
                        p.sub_(e)
                optimizer.step()
    """,
    "element assigned and changed in the step": """
        out = {}

        def train():
            for x, y in loader:
                out["loss"] = criterion(network(x), y)
                out["copy"] = out["loss"].detach().clone()
                out["copy"].mul_(0.5)
                (out["loss"] + out["copy"]).backward()
                optimizer.step()
    """,
}


class Loader:
    """Looks when the first step begins, as the loop over steps does."""

    index = 0

    def __init__(self) -> None:
        self.script: dict[str, Any] = {}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        network, optimizer = self.script["network"], self.script["optimizer"]
        known = (network, optimizer, *network.parameters(), *network.modules())
        refuse_carried(
            sys._getframe(1), is_saved=False, saved=frozenset(map(id, known)), modules=[network]
        )
        yield torch.ones(4, 2), torch.ones(4, 1)


def run_script(path: Path, text: str) -> None:
    loader = Loader()

    def retry(function: Callable[[], object]) -> None:
        loader.script = function.__globals__
        function()

    own.update({retry.__code__, Loader.__iter__.__code__})
    path.write_text(HEAD + dedent(text) + "\nretry(train)\n")
    runpy.run_path(str(path), init_globals={"retry": retry, "loader": loader})


own: set[Any] = set()


@pytest.fixture(autouse=True)
def calls_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))


@pytest.mark.parametrize("text", CARRIED.values(), ids=CARRIED)
def test_what_trains_with_earlier_steps_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        TrainingError, match=r"restarts or differs between|is computed from the weights"
    ):
        run_script(tmp_path / "script.py", text)


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_other_calls_are_accepted(tmp_path: Path, text: str) -> None:
    run_script(tmp_path / "script.py", text)
