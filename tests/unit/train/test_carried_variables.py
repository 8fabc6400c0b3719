"""Variables that a loop carries from step to step, outside of the job's state."""

from __future__ import annotations

import ast
import linecache
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from kit.run_kit import job, process

from elastic.errors import TrainingError
from elastic.train import checks
from elastic.train.carried import carried_variables, read_after, refuse_carried
from elastic.train.checks import loops_around
from elastic.train.loader import ElasticLoader

CARRIED = {
    "the hidden state of an RNN": """
        h = None
        for x, y in loader:
            out, h = model(x, h)
            loss(out, y).backward()
            h = h.detach()
    """,
    "a running mean": """
        mean = 0.0
        for x, y in loader:
            reward = play(x)
            (model(x) * (reward - mean)).sum().backward()
            mean = 0.9 * mean + 0.1 * reward
    """,
    "the batch before": """
        previous = None
        for epoch in run.epochs(3):
            for x, y in loader:
                if previous is not None:
                    x = (x + previous) / 2
                loss(model(x), y).backward()
                previous = x
    """,
    "an optimizer that an epoch replaces": """
        current = optimizer
        for epoch in run.epochs(3):
            if epoch == 1:
                current = sgd
            for x, y in loader:
                loss(model(x), y).backward()
                current.step()
    """,
    "a queue in a tensor": """
        queue = torch.zeros(64, 8)
        for x, y in loader:
            key = model(x)
            loss(key, queue).backward()
            queue[: len(key)] = key.detach()
    """,
    "a queue in a list": """
        keys = []
        for x, y in loader:
            key = model(x)
            loss(key, keys).backward()
            keys.append(key.detach())
    """,
    "weights of every tenth step": """
        old = {}
        for i, (x, y) in enumerate(loader):
            if i % 10 == 0:
                for p in model.parameters():
                    old[p] = p.data.clone()
            for p in model.parameters():
                p.data = old[p]
    """,
    "a tensor changed in place": """
        center = torch.zeros(8)
        for x, y in loader:
            out = model(x)
            loss(out - center).backward()
            center.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
    """,
    "a temperature": """
        temperature = 1.0
        for x, y in loader:
            (loss(model(x), y) * temperature).backward()
            temperature = max(0.1, temperature * 0.9)
    """,
    "a setting of the model": """
        temperature = 1.0
        for x, y in loader:
            model.temperature = temperature
            loss(model(x), y).backward()
            temperature *= 0.9
    """,
    "a rate": """
        count = 0
        for x, y in loader:
            count += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / count
            loss(model(x), y).backward()
    """,
    "a rate that a comparison lowers": """
        least, rate = 1e9, 0.1
        for x, y in loader:
            value = loss(model(x), y)
            value.backward()
            if value.item() > least:
                rate = rate / 2
            least = min(least, value.item())
            optimizer.param_groups[0]["lr"] = rate
    """,
    "a rate by keyword": """
        rate = 0.1
        for x, y in loader:
            for group in optimizer.param_groups:
                group.update(lr=rate)
            loss(model(x), y).backward()
            rate *= 0.9
    """,
    "a factor of gradients": """
        factor = 1.0
        for x, y in loader:
            loss(model(x), y).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(factor)
            factor *= 0.9
    """,
    "a value that a condition assigns": """
        count = 0
        for x, y in loader:
            count += 1
            if (factor := 0.9 ** count) > 0.5:
                (loss(model(x), y) * factor).backward()
    """,
    "a loop of next()": """
        batches, previous = iter(loader), 0.0
        while run.state["step"] < 9:
            x, y = next(batches)
            (loss(model(x), y) - previous).backward()
            previous = y
    """,
    "a sum that a scheduler gets after the pass": """
        for epoch in run.epochs(3):
            total = 0.0
            for x, y in loader:
                value = loss(model(x), y)
                value.backward()
                total += value.item()
            scheduler.step(total / len(loader))
    """,
    "a count of epochs without progress": """
        worse = 0
        for epoch in run.epochs(9):
            for x, y in loader:
                loss(model(x), y).backward()
            worse = 0 if is_better(model) else worse + 1
            if worse > 2:
                break
    """,
    "a function that trains": """
        h = None
        for x, y in loader:
            h = train_step(x, h)
    """,
}
NOT_CARRIED = {
    "what is added to a list in the state": """
        for epoch in run.epochs(9):
            for x, y in loader:
                value = loss(model(x), y)
                value.backward()
                if len(x) > 2:
                    last = value.item()
            run.state["values"].append(last)
            if epoch == 3:
                break
    """,
    "a sum that is printed": """
        total = 0.0
        for i, (x, y) in enumerate(loader):
            value = loss(model(x), y)
            value.backward()
            total += value.item()
            if i % 10 == 9:
                print(total / 10)
                total = 0.0
    """,
    "a loss that is read after its loop": """
        for epoch in run.epochs(3):
            for x, y in loader:
                value = loss(model(x), y)
                value.backward()
            scheduler.step(run.mean(1, loss=value)["loss"])
    """,
    "what a step begins": """
        for x, y in loader:
            h = torch.zeros(3)
            for t in range(5):
                h = cell(x[t], h)
            h.sum().backward()
    """,
    "what a condition assigns and reads": """
        for x, y in loader:
            if (weight := len(x)) > 2 and weight < 9:
                (loss(model(x), y) * weight).backward()
    """,
    "what both branches assign": """
        for x, y in loader:
            if len(x) > 2:
                weight = 1.0
            else:
                weight = 0.5
            (loss(model(x), y) * weight).backward()
    """,
    "a list that each step clears": """
        losses = []
        for x, y in loader:
            losses.clear()
            for head in model(x):
                losses.append(loss(head, y))
            sum(losses).backward()
    """,
    "kept in the state": """
        h = run.state.get("h")
        for x, y in loader:
            out, h = model(x, h)
            loss(out, y).backward()
            run.state["h"] = h
    """,
    "an object in the state": """
        norms = run.state.setdefault("norms", [])
        for x, y in loader:
            loss(model(x), y).backward()
            clip(model, sorted(norms)[0])
            optimizer.step(norms)
            norms.append(1.0)
    """,
    "tracked": """
        average = torch.zeros(3)
        run.track(average=Holder(average))
        for x, y in loader:
            (model(x) - average).sum().backward()
            average.lerp_(x.mean(0), 0.1)
    """,
    "weights that are given back in the same step": """
        old = {}
        for x, y in loader:
            for p in model.parameters():
                old[p] = p.data.clone()
            loss(model(x), y).backward()
            for q in model.parameters():
                q.data = old[q]
    """,
    "a cache": """
        cache = {}
        for x, y in loader:
            if y not in cache:
                cache[y] = embedding(y)
            loss(model(x), cache[y]).backward()
    """,
    "a count of an accumulation": """
        count = 0
        for x, y in loader:
            (loss(model(x), y) / 4).backward()
            count += 1
            if count == 4:
                optimizer.step()
                count = 0
    """,
    "the best result": """
        best = 0.0
        for epoch in run.epochs(3):
            for x, y in loader:
                loss(model(x), y).backward()
            accuracy = evaluate()
            if accuracy > best:
                best = accuracy
                torch.save(model.state_dict(), "best.pt")
    """,
    "an iterator that begins again": """
        others = iter(unlabelled)
        for x, y in loader:
            try:
                z = next(others)
            except StopIteration:
                others = iter(unlabelled)
                z = next(others)
            loss(model(x), model(z)).backward()
    """,
    "a mask that is made once": """
        mask = None
        for x, y in loader:
            if mask is None or mask.size(0) != len(x):
                mask = torch.ones(len(x))
            loss(model(x, mask), y).backward()
    """,
    "a variable of a closure": """
        for x, y in loader:
            def closure():
                value = loss(model(x), y)
                value.backward()
                return value
            optimizer.step(closure)
            value = 1.0
    """,
}


def carried_by(body: str, *, is_reported: bool = False) -> list[str]:
    function = ast.parse("def train():" + body).body[0]
    lines = enumerate(body.splitlines(), start=1)
    line = next(n for n, text in lines if re.search(r"for .* in .*loader|next\(batches", text))
    loops = loops_around(function, line)
    carried = carried_variables(function, loops, {"train_step"})
    return [c.name for c in carried if (c.use is None) is is_reported]


@pytest.mark.parametrize("body", CARRIED.values(), ids=CARRIED)
def test_a_variable_is_carried_into_the_training(body: str) -> None:
    assert carried_by(body)


@pytest.mark.parametrize("body", NOT_CARRIED.values(), ids=NOT_CARRIED)
def test_a_variable_is_not_carried_into_the_training(body: str) -> None:
    assert carried_by(body) == []


REPORTED = {
    "a sum that is printed": ["total"],
    "the best result": ["best"],
    "a sum that is never read": [],
    "a clock": [],
    "a list of losses": ["losses"],
}
NOT_CARRIED["a sum that is never read"] = """
        total = 0.0
        for x, y in loader:
            value = loss(model(x), y)
            value.backward()
            total += value.item()
    """
NOT_CARRIED["an optimizer that each epoch chooses"] = """
        for epoch in run.epochs(3):
            current = optimizer if epoch < 1 else sgd
            with profile() as prof:
                for x, y in loader:
                    loss(model(x), y).backward()
                    current.step()
                    prof.step()
    """
NOT_CARRIED["a clock"] = """
        before = time.time()
        for x, y in loader:
            loss(model(x), y).backward()
            print(time.time() - before)
            before = time.time()
    """
NOT_CARRIED["a list of losses"] = """
        losses = []
        for x, y in loader:
            value = loss(model(x), y)
            value.backward()
            losses.append(value.item())
        print(sum(losses) / len(losses))
    """


@pytest.mark.parametrize(("name", "variables"), REPORTED.items(), ids=REPORTED)
def test_a_variable_is_only_reported(name: str, variables: list[str]) -> None:
    assert carried_by(NOT_CARRIED[name], is_reported=True) == variables


SCRIPT = """
def train_step(batch, factor):
    batch.backward(factor)
def train():
    factor = 1.0
    for batch in loader:
        train_step(batch, factor)
        factor *= 0.5
call(train)
"""


class Batch:
    def backward(self, factor: float) -> None:
        """Compute gradients."""


class Scheduler:
    """Part of the job's state."""

    def step(self, value: float) -> None:
        """Set a rate."""

    def update(self, value: float) -> None:
        """Move an average."""


SCHEDULER = Scheduler()


class Loader:
    """Looks when the first step begins, as the loop over steps does."""

    index = 0

    def __init__(self, *, is_saved: bool = False, **given: Any) -> None:
        self._given: dict[str, Any] = {"is_saved": is_saved, "saved": {id(SCHEDULER)}, **given}

    def __iter__(self) -> Iterator[Batch]:
        refuse_carried(sys._getframe(1), **self._given)
        yield Batch()


def retry(function: Callable[[], object]) -> object:
    return function()


@contextmanager
def no_sync() -> Iterator[None]:
    yield


def start(function: Callable[[], object]) -> object:
    return function()


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs SCRIPT, with ``retry`` and Loader as the package's."""
    own = {retry.__code__, start.__code__, Loader.__iter__.__code__}
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))
    path = tmp_path / "script.py"

    def run(
        call: Callable[..., object], loader: Loader, text: str = SCRIPT, **names: object
    ) -> None:
        path.write_text(text)
        linecache.clearcache()
        runpy.run_path(
            str(path),
            init_globals={
                "call": call,
                "loader": loader,
                "scheduler": SCHEDULER,
                "optimizer": SCHEDULER,
                "no_sync": no_sync,
                **names,
            },
        )

    return run


def test_a_tensor_of_a_module_is_to_become_a_buffer(run_script: Callable[..., None]) -> None:
    text = """
import torch
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.center = torch.zeros(1)
    def forward(self, x):
        self.center = self.center * 0.9 + x
        return self.center
loss = Loss()
def train():
    for batch in loader:
        batch.backward(loss(1.0))
call(train)
"""
    with pytest.raises(TrainingError, match=r"register_buffer\('center', …\)"):
        run_script(retry, Loader(), text)


def test_a_module_that_counts_is_to_be_tracked(run_script: Callable[..., None]) -> None:
    text = """
import torch
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return x * 0.9 ** self.calls
loss = Loss()
def train():
    for batch in loader:
        batch.backward(loss(1.0))
call(train)
"""
    with pytest.raises(TrainingError, match=r"run\.track\(loss=loss\) before training"):
        run_script(retry, Loader(), text)


def test_the_error_names_the_change_its_use_and_what_replaces_it(
    run_script: Callable[..., None],
) -> None:
    with pytest.raises(TrainingError) as refused:
        run_script(retry, Loader())
    text = str(refused.value)
    assert "`factor *= 0.5` in train: after a death, run.retry calls its function again" in text
    assert "line 3, `batch.backward(factor)`" in text
    assert 'run.state["factor"]' in text.replace("'", '"')


def test_a_variable_that_need_not_be_exact_is_accepted(run_script: Callable[..., None]) -> None:
    run_script(retry, Loader(ignored=("factor",)))


def test_without_run_retry_only_a_job_with_checkpoints_begins_again(
    run_script: Callable[..., None],
) -> None:
    run_script(start, Loader())
    with pytest.raises(
        TrainingError, match="resumes from its last checkpoint, but runs the script"
    ):
        run_script(start, Loader(is_saved=True))


METER = """
class Meter:
    def __init__(self):
        self.sum = self.count = 0
    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count
"""
# Each with its change and what it changes.
ELSEWHERE = {
    "an attribute of a function": (
        """
def weight():
    weight.calls += 1
    return 0.9 ** weight.calls
weight.calls = 0
def train():
    for batch in loader:
        batch.backward(weight())
call(train)
""",
        "`weight.calls += 1` in weight",
    ),
    "an attribute of a class": (
        """
class Settings:
    weight = 1.0
def train():
    for batch in loader:
        batch.backward(Settings.weight)
        Settings.weight *= 0.9
call(train)
""",
        "`Settings.weight *= 0.9` in train",
    ),
    "a generator of random numbers": (
        """
import random
rng = random.Random(0)
def train():
    for batch in loader:
        batch.backward(0.5 if rng.random() < 0.5 else 1.0)
call(train)
""",
        "what rng draws next restarts or differs between ranks",
    ),
    "a generator of NumPy in an attribute, in a comprehension": (
        """
import numpy as np
class Trainer:
    def __init__(self):
        self.rng = np.random.default_rng(0)
    def fit(self):
        for batch in loader:
            batch.backward(sum(self.rng.normal() for _ in range(3)))
call(Trainer().fit)
""",
        "what self.rng draws next restarts",
    ),
    "a generator of torch that each epoch seeds": (
        """
import torch
def train():
    for epoch in range(2):
        g = torch.Generator().manual_seed(epoch)
        for batch in loader:
            batch.backward(torch.rand(1, generator=g))
call(train)
""",
        "what g draws next restarts",
    ),
    "the order of a list": (
        """
import random
weights = [0.5, 1.0]
def train():
    for epoch in range(2):
        random.shuffle(weights)
        for batch in loader:
            batch.backward(weights[0])
call(train)
""",
        "`random.shuffle(weights)` in train",
    ),
    "sums of gradients, by the elements of a list": (
        """
import torch
totals, parameters = [torch.zeros(2)], [torch.ones(2)]
def train():
    for batch in loader:
        for total, p in zip(totals, parameters):
            total += 1.0
            p.grad = total / 2
call(train)
""",
        "`total += 1.0` in train: after a death, run.retry calls its function again, and totals",
    ),
    "sums of gradients in a list of the function": (
        """
import torch
parameters = [torch.ones(2)]
def train():
    totals = [torch.zeros_like(p) for p in parameters]
    for batch in loader:
        for i, total in enumerate(totals):
            total += 1.0
        batch.backward(totals)
call(train)
""",
        "`total += 1.0` in train",
    ),
    "averages, by the values of a dict": (
        """
import torch
averages = {"w": torch.zeros(2)}
def train():
    for batch in loader:
        for name, average in averages.items():
            average.mul_(0.9)
        batch.backward(averages)
call(train)
""",
        "`average.mul_(0.9)` in train",
    ),
    "the order of a deque": (
        """
from collections import deque
weights = deque([0.5, 1.0])
def train():
    for batch in loader:
        batch.backward(weights[0])
        weights.rotate(1)
call(train)
""",
        "`weights.rotate(1)` in train",
    ),
    "a list from which each step takes one": (
        """
weights = [0.5, 1.0]
def train():
    for batch in loader:
        weight = weights.pop()
        batch.backward(weight)
call(train)
""",
        "`weight = weights.pop()` in train",
    ),
    "a variable of a function around": (
        """
def train():
    count = 0
    def weight():
        nonlocal count
        count += 1
        return 0.9 ** count
    for batch in loader:
        batch.backward(weight())
call(train)
""",
        "`count += 1` in weight",
    ),
    "a global variable of a function in a function": (
        """
count = 0
def advance():
    global count
    count = count + 1
def weight():
    advance()
    return 0.9 ** count
def train():
    for batch in loader:
        batch.backward(weight())
call(train)
""",
        "`count = count + 1` in advance",
    ),
    "an attribute": (
        """
class Trainer:
    def __init__(self):
        self.weight = 1.0
    def fit(self):
        for batch in loader:
            self.step(batch)
    def step(self, batch):
        batch.backward(self.weight)
        self.weight *= 0.9
call(Trainer().fit)
""",
        "`self.weight *= 0.9` in step",
    ),
    "an attribute of another object, by another name": (
        METER
        + """
def train():
    for epoch in range(2):
        losses = Meter()
        for batch in loader:
            batch.backward(1.0)
            losses.update(value=0.5, n=2)
        scheduler.step(losses.average)
call(train)
""",
        "`self.count += n` in update: after a death, run.retry calls its function again, and "
        "losses.count restarts",
    ),
    "a list in an attribute": (
        """
class Pool:
    def __init__(self):
        self.images = []
    def query(self, image):
        self.images.append(image)
        return self.images[0]
pool = Pool()
def train():
    for batch in loader:
        batch.backward(pool.query(batch))
call(train)
""",
        "`self.images.append(image)` in query",
    ),
    "a global list": (
        """
keys = []
def train():
    for batch in loader:
        batch.backward(keys)
        keys.append(batch)
call(train)
""",
        "`keys.append(batch)` in train",
    ),
    "an attribute of a module": (
        """
from torch import nn
class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0
    def forward(self, x):
        self.count += 1
        return x * 0.9 ** self.count
loss = Annealed()
def train():
    for batch in loader:
        batch.backward(loss(1.0))
call(train)
""",
        "`self.count += 1` in forward",
    ),
    "a sum that a function returns": (
        """
def one_epoch():
    total = 0.0
    for batch in loader:
        batch.backward(1.0)
        total += 0.5
    if total < 0:
        return None
    return total
def train():
    for epoch in range(2):
        total = one_epoch()
        scheduler.step(total)
call(train)
""",
        "`total += 0.5` in one_epoch",
    ),
    "the position in a cycle": (
        """
import itertools
def train():
    weights = itertools.cycle([1.0, 0.5])
    for batch in loader:
        batch.backward(next(weights))
call(train)
""",
        "`next(weights)` in train: after a death, run.retry calls its function again, and the "
        "position of weights restarts",
    ),
    "the position in a cycle that the loop's head creates": (
        """
from itertools import cycle
def train():
    for weight, batch in zip(cycle([1.0, 0.5]), loader):
        batch.backward(weight)
call(train)
""",
        "the position of cycle([1.0, 0.5]) restarts",
    ),
    "the position of a generator beside the loader": (
        """
def ramp():
    n = 0
    while True:
        n += 1
        yield min(1.0, n / 10)
def train():
    weights = ramp()
    for batch, weight in zip(loader, weights):
        batch.backward(weight)
call(train)
""",
        "the position of weights restarts",
    ),
    "what an option that is switched on later changes": (
        """
class Trainer:
    def __init__(self):
        self.is_annealed, self.weight = False, 1.0
    def start(self):
        self.is_annealed = True
    def fit(self):
        for batch in loader:
            if self.is_annealed:
                self.weight *= 0.5
            batch.backward(self.weight)
call(Trainer().fit)
""",
        "`self.weight *= 0.5` in fit",
    ),
    "the index of a batch": (
        """
def train():
    for i, batch in enumerate(loader):
        batch.backward(0.9 ** i)
call(train)
""",
        "the count of enumerate(loader) restarts",
    ),
    "which batches train a generator, by the index": (
        """
def train():
    for i, batch in enumerate(batches()):
        batch.backward(1.0)
        if i % 3 == 0:
            batch.backward(0.5)
def batches():
    for batch in loader:
        yield batch
call(train)
""",
        "the count of enumerate(batches()) restarts",
    ),
    "the last batch of an accumulation, by the index": (
        """
def train():
    for i, batch in enumerate(loader):
        is_last = i + 1 == 16
        batch.backward(1.0)
        if (i + 1) % 3 == 0 or is_last:
            scheduler.step(None)
call(train)
""",
        "the count of enumerate(loader) restarts",
    ),
    "which batches move an average, by a count": (
        """
def train():
    count = 0
    for batch in loader:
        batch.backward(1.0)
        count += 1
        if count % 2 == 0:
            scheduler.update(batch)
call(train)
""",
        "`count += 1` in train",
    ),
    "a variable of a generator that the loop reads": (
        """
def annealed(batches):
    scale = 1.0
    for batch in batches:
        yield batch, scale
        scale *= 0.9
def train():
    for i, (batch, weight) in enumerate(annealed(loader)):
        batch.backward(weight)
call(train)
""",
        "`scale *= 0.9` in annealed",
    ),
    "an attribute of one of several callbacks": (
        """
class Warmup:
    def __init__(self):
        self.count = 0
    def on_step(self, batch):
        self.count += 1
        batch.backward(self.count)
class Printer:
    def on_step(self, batch):
        print(batch)
class Trainer:
    def __init__(self):
        self.callbacks = {"step": [Printer(), Warmup()]}
    def fire(self, event, batch):
        for callback in self.callbacks.get(event, []):
            getattr(callback, "on_step")(batch)
    def fit(self):
        for batch in loader:
            self.fire("step", batch)
call(Trainer().fit)
""",
        "`self.count += 1` in on_step",
    ),
    "a history by which gradients are clipped": (
        """
from torch.nn.utils import clip_grad_norm_
class Clip:
    def __init__(self):
        self.norms = []
    def __call__(self, batch):
        self.norms.append(2.0)
        clip_grad_norm_([], sum(self.norms) / len(self.norms))
clip = Clip()
def train():
    for batch in loader:
        batch.backward(1.0)
        clip(batch)
call(train)
""",
        "`self.norms.append(2.0)` in __call__",
    ),
    "an object that a method returns, in a function that evaluates": (
        """
class Control:
    def __init__(self):
        self.weight = 1.0
    def eval(self):
        return self
    def lowered(self, control):
        control.weight *= 0.9
        return control
def train():
    control = Control()
    control.eval()
    for batch in loader:
        batch.backward(control.weight)
        control = control.lowered(control)
call(train)
""",
        "`control.weight *= 0.9` in lowered",
    ),
}
HARMLESS = {
    "generators that each step seeds or creates": """
import random
import torch
g, rng = torch.Generator(), random.Random(0)
def train():
    for batch in loader:
        g.manual_seed(loader.index)
        rng.seed(loader.index)
        noise = torch.Generator().manual_seed(loader.index)
        batch.backward(torch.rand(1, generator=g) + rng.random() + torch.rand(1, generator=noise))
call(train)
""",
    "the default generators, and one whose draws train nothing": """
import random
import numpy as np
import torch
rng = np.random.default_rng(0)
def train():
    for batch in loader:
        shown = rng.integers(2)
        batch.backward(random.random() + torch.rand(1, generator=torch.default_generator))
        print(shown)
call(train)
""",
    "products of the numbers in a list": """
weights, scales = [0.5, 1.0], {"a": 2.0, "b": 3.0}
def train():
    for batch in loader:
        total = 0.0
        for i, weight in enumerate(weights):
            weight *= 2
            total += weight
        for name, scale in scales.items():
            scale += 1
            total += scale
        batch.backward(total)
call(train)
""",
    "lists that each step fills": """
import random
def train():
    for batch in loader:
        weights = [0.5, 1.0]
        random.shuffle(weights)
        batch.backward(weights.pop())
call(train)
""",
    "the index of an accumulation, of a report, and from the loader": """
def train():
    for i, batch in enumerate(loader):
        if (i + 1) % 4:
            with no_sync():
                value = batch.backward(1.0)
        needs_update = (i + 1) % 4 == 0
        if not needs_update:
            with no_sync():
                value = batch.backward(1.0)
        else:
            value = batch.backward(1.0)
        if needs_update:
            optimizer.step(None)
        if i % 10 == 0:
            print(i, value)
    for i, batch in enumerate(loader, start=loader.index):
        batch.backward(0.9 ** i)
call(train)
""",
    "options that are off": """
from types import SimpleNamespace
class Trainer:
    def __init__(self, options):
        self.options, self.is_annealed, self.weight = options, options.anneal, 1.0
    def fit(self, average=None):
        for batch in loader:
            if average is not None or (self.options.anneal and batch):
                self.weight *= 0.5
            batch.backward(self.used(0.5 if self.is_annealed else 1.0))
    def used(self, scale):
        if not self.options.anneal:
            return scale
        self.weight = self.weight * scale
        return self.weight
trainer = Trainer(SimpleNamespace(anneal=False))
call(trainer.fit)
""",
    "a list that each step empties": """
losses = []
def train():
    for batch in loader:
        del losses[:]
        losses.append(1.0)
        batch.backward(losses)
call(train)
""",
    "meters and counts that are printed": METER
    + """
class Trainer:
    def __init__(self):
        self.step, self.history, self.losses = 0, [], Meter()
    def fit(self):
        for epoch in range(2):
            for batch in loader:
                self.train_step(batch)
                if self.step % 10 == 0:
                    print(self.step, self.losses.average)
            self.history.append(self.losses.average)
            print({key: value for key, value in enumerate(self.history)})
    def train_step(self, batch):
        self.weight = len(self.__dict__)
        batch.backward(self.weight)
        self.losses.update(0.5)
        self.step += 1
call(Trainer().fit)
""",
    "what a step begins in one method and ends in another": """
class Trainer:
    def __init__(self):
        self.loss = None
    def forward(self, batch):
        if batch is None:
            return
        self.loss = 1.0
    def fit(self):
        for batch in loader:
            self.forward(batch)
            batch.backward(self.loss)
class Always(Trainer):
    def forward(self, batch):
        self.loss = 1.0
call(Always().fit)
""",
    "a mask that a module makes once": """
class Masked:
    mask = None
    def __call__(self, x):
        if self.mask is None or self.mask.size(0) != x:
            mask = [x]
            self.mask = mask
        return self.mask
loss = Masked()
def train():
    for batch in loader:
        batch.backward(loss(1.0))
call(train)
""",
    "weights that an evaluation replaces": """
class Average:
    def __init__(self):
        self.backup = {}
    def swap(self):
        for p in parameters:
            self.backup[p] = p.data.clone()
            p.data = p.data * 0.9
    def restore(self):
        for p in parameters:
            p.data = self.backup[p]
        self.backup = {}
parameters, average = [], Average()
def train():
    for i, batch in enumerate(loader):
        batch.backward(1.0)
        if i % 2 == 0:
            average.swap()
            average.restore()
call(train)
""",
    "a random generator without a position": """
def noise():
    while True:
        yield 0.5
def train():
    numbers = noise()
    for batch in loader:
        batch.backward(next(numbers))
call(train)
""",
    "variables of a function begin with each call": """
def weight(n):
    total = 0.0
    for i in range(3):
        total += n
    return total
def train():
    for batch in loader:
        batch.backward(weight(1.0))
call(train)
""",
}


@pytest.mark.parametrize(("text", "change"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_is_no_variable_of_the_function_with_the_loop_is_carried(
    run_script: Callable[..., None], text: str, change: str
) -> None:
    with pytest.raises(TrainingError, match=re.escape(change)):
        run_script(retry, Loader(), text)


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_other_objects_are_not_carried(run_script: Callable[..., None], text: str) -> None:
    run_script(retry, Loader(counts_continue=True), text)


@pytest.mark.parametrize("name", ["losses.count", "losses"])
def test_an_attribute_that_need_not_be_exact_is_accepted(
    run_script: Callable[..., None], name: str
) -> None:
    text, _ = ELSEWHERE["an attribute of another object, by another name"]
    names = (name, "losses.sum", "losses.average")
    run_script(retry, Loader(ignored=names), text)


def test_objects_of_the_job_are_not_carried(run_script: Callable[..., None]) -> None:
    weights = [1.0]
    text = """
def train():
    for batch in loader:
        batch.backward(weights[0])
        weights[0] *= 0.9
call(train)
"""
    run_script(retry, Loader(saved={id(weights)}), text, weights=weights)
    with pytest.raises(TrainingError, match=r"weights\[0\] \*= 0.9"):
        run_script(retry, Loader(), text, weights=weights)


COUNTED = ("i % 4 == 0", "(i + 1) % n == 0 or i + 1 == 18", "i == 9")


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("head", ["loader", "loader, 1", "loader, start=0", "tqdm(loader)"])
@pytest.mark.parametrize("test", COUNTED)
def test_what_is_trained_by_a_count_of_enumerate_is_the_same_if_it_continues(
    run_script: Callable[..., None], test: str, head: str, continues: bool
) -> None:
    text = f"""
n = 4
def train():
    for i, batch in enumerate({head}):
        batch.backward(1.0)
        if {test}:
            optimizer.step(None)
call(train)
"""
    accepted = nullcontext() if continues else pytest.raises(TrainingError, match="the count of")
    with accepted:
        run_script(retry, Loader(counts_continue=continues), text, tqdm=lambda given: given)


def test_a_job_refuses_such_a_variable_in_its_first_step_also_while_a_debugger_traces() -> None:
    with process() as run:
        script = job(run)

        def train() -> None:
            factor = 1.0
            for x, y in script.loader:
                script.optimizer.zero_grad()
                (script.model(x) * factor - y).square().mean().backward()
                script.optimizer.step()
                factor *= 0.5

        before = sys.gettrace()
        sys.settrace(before or (lambda *_: None))
        try:
            with pytest.raises(TrainingError, match=r"`factor \*= 0.5` in train"):
                run.retry(train)
        finally:
            sys.settrace(before)


@pytest.mark.parametrize(
    ("after", "names"),
    [
        ("print(loss.item(), len(x))", {"loss", "x"}),
        ("loss = evaluate()\nprint(loss)", set()),
        ("print(total, epoch)", set()),
        ("if epoch:\n    log(loss)", {"loss"}),
    ],
)
def test_what_only_the_last_iteration_of_a_loop_has_assigned(after: str, names: set[str]) -> None:
    tree = ast.parse(f"""
def train():
    for epoch in run.epochs(3):
        total = 0.0
        for x, y in loader:
            loss = f(model(x), y)
            total += loss.item()
{indent(after, " " * 8)}
""")
    loop = [n for n in ast.walk(tree) if isinstance(n, ast.For)][1]
    assert read_after(tree, loop) == names


ATTRIBUTES = {
    "decays": ("self.tau = max(0.5, self.tau * 0.95)", ""),
    "decays by another attribute": ("self.tau = self.tau * self.decay", ""),
    "counts": ("self.tau += 1", ""),
    "decays in training": ("if self.training: self.tau *= 0.95", ""),
    "changes at an epoch": ("pass", "if epoch == 1: network.tau = 0.5"),
}
MEASURED = {
    "an average of outputs": ("self.tau = 0.9 * self.tau + 0.1 * float(x.mean())", ""),
    "a decay that outputs decide": ("if float(x.mean()) > 1: self.tau *= 0.9", ""),
    "another object": ("pass", "if epoch == 1: network.tau = other"),
}


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize(
    ("forward", "epoch"), [*ATTRIBUTES.values(), *MEASURED.values()], ids=[*ATTRIBUTES, *MEASURED]
)
def test_numbers_of_modules_are_state(
    run_script: Callable[..., None], forward: str, epoch: str, is_saved: bool
) -> None:
    """If they are the same on all ranks, and the module belongs to the job."""
    is_measured = (forward, epoch) in MEASURED.values()
    loader = Loader()
    script = f"""
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.tau, self.decay = 1.0, 0.9

    def forward(self, x):
        {forward}
        return self.layer(x) / self.tau

network = Network()
keep(network)
other = torch.tensor(2.0)
def train():
    for epoch in range(2):
        {epoch}
        for batch in loader:
            network(torch.ones(1, 1)).sum().backward()
call(train)
"""

    def keep(network: object) -> None:
        loader._given["saved"] = {id(network)} if is_saved else set()

    if is_saved and not is_measured:
        run_script(retry, loader, script, keep=keep)
        return
    with pytest.raises(TrainingError, match="tau"):
        run_script(retry, loader, script, keep=keep)


DATASETS = {
    "an object": ("data.transform = lambda x: x", True),
    "a number of the job's state": ("data.scale = 0.5", False),
    "a variable": ("weights = torch.zeros(4)", True),
    "what it does not read": ("other = torch.zeros(4)", False),
}


@pytest.mark.parametrize(("change", "is_refused"), DATASETS.values(), ids=DATASETS)
def test_batches_depend_on_what_their_dataset_reads(
    run_script: Callable[..., None], change: str, is_refused: bool
) -> None:
    loader = Loader()
    text = f"""
import torch
weights = other = torch.ones(4)
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.transform, self.scale = (lambda x: 2 * x), 1.0
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.transform(torch.ones(1)) * self.scale * weights[index]
data = Data()
batches = loader_of(data)
def train():
    global weights, other
    for epoch in range(2):
        if epoch == 1:
            {change}
        for batch in batches:
            batch.backward(batch)
call(train)
"""

    class OfData(ElasticLoader):
        def __init__(self, dataset: object) -> None:
            self.dataset = dataset
            self.collate_fn = None

        def __iter__(self) -> Iterator[Batch]:
            yield from loader

    if not is_refused:
        run_script(retry, loader, text, loader_of=OfData)
        return
    with pytest.raises(TrainingError, match="restarts or differs"):
        run_script(retry, loader, text, loader_of=OfData)


def test_a_target_that_is_replaced_at_times_is_to_be_tracked(
    run_script: Callable[..., None],
) -> None:
    text = """
import copy, torch
network = torch.nn.Linear(1, 1)
target = copy.deepcopy(network)
def train():
    for step, batch in enumerate(loader, start=loader.index):
        if step % 5 == 0:
            target.load_state_dict(network.state_dict())
        batch.backward(target(torch.ones(1)))
call(train)
"""
    with pytest.raises(TrainingError, match=r"run\.track\(target=target\) before training"):
        run_script(retry, Loader(), text)


def test_weights_that_are_taken_back_are_carried(run_script: Callable[..., None]) -> None:
    text = """
import copy, torch
network = torch.nn.Linear(1, 1)
keep(network)
def train():
    best = None
    for epoch in range(2):
        for batch in loader:
            batch.backward(1.0)
        if epoch == 1:
            best = copy.deepcopy(network.state_dict())
    network.load_state_dict(best)
call(train)
"""
    loader = Loader()

    def keep(network: object) -> None:
        loader._given["saved"] = {id(network)}

    with pytest.raises(TrainingError, match="best restarts or differs"):
        run_script(retry, loader, text, keep=keep)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_schedule_depends_on_what_its_function_reads(
    run_script: Callable[..., None], is_local: bool
) -> None:
    parts = """
factor = {"value": 1.0}
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: factor["value"])
"""
    text = f"""
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
{"" if is_local else parts}
def train():
    {"; ".join(parts.split(chr(10))[1:-1]) if is_local else ""}
    for batch in loader:
        batch.backward(1.0)
        factor["value"] *= 0.9
        schedule.step()
call(train)
"""
    with pytest.raises(TrainingError, match="factor restarts or differs"):
        run_script(retry, Loader(), text)


@pytest.mark.parametrize("is_of_job", [True, False])
def test_a_module_of_the_jobs_modules_is_no_other_one(
    run_script: Callable[..., None], is_of_job: bool
) -> None:
    text = """
import torch
encoder, decoder = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
model = torch.nn.ModuleList([encoder, decoder])
keep(encoder, decoder)
def train():
    for batch in loader:
        batch.backward(decoder(encoder(torch.ones(1))) + model[0](torch.ones(1)))
        for parameter in model.parameters():
            parameter.data.clamp_(-1.0, 1.0)
call(train)
"""
    loader = Loader()

    def keep(*modules: Any) -> None:
        own = modules if is_of_job else modules[:1]
        saved = {id(one) for m in own for one in (m, *m.parameters())}
        loader._given["saved"] = saved

    if is_of_job:
        run_script(retry, loader, text, keep=keep)
        return
    with pytest.raises(TrainingError, match=r"run\.track\(model=model\)"):
        run_script(retry, loader, text, keep=keep)
