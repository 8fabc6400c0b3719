"""Values that the function of run.retry computes from the weights, before the loop that resumes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.errors import TrainingError
from elastic.train import checks
from elastic.train.carried import refuse_carried

HEAD = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

network = nn.Linear(2, 1)
x, y = torch.ones(4, 2), torch.zeros(4, 1)
"""


class Loader:
    """Calls the check when the first step begins, as the loop over steps does."""

    index = 0

    def __init__(self, **options: Any) -> None:
        self.options: dict[str, Any] = {"is_saved": False, **options}
        self.script: dict[str, Any] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        refuse_carried(sys._getframe(1), modules=[self.script["network"]], **self.options)
        yield torch.ones(1, 2)


def run_script(tmp_path: Path, text: str, **options: Any) -> None:
    loader = Loader(**options)

    def retry(function: Callable[..., Any]) -> None:
        loader.script = function.__globals__
        function()

    own.update({retry.__code__, Loader.__iter__.__code__})
    path = tmp_path / "script.py"
    path.write_text(HEAD + text)
    runpy.run_path(str(path), init_globals={"retry": retry, "loader": loader, "state": {}})


own: set[Any] = set()


@pytest.fixture(autouse=True)
def calls_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))


TRAIN = """
def train():
    for epoch in range(2):
        {before}
        for batch in loader:
            ({loss}).backward()
retry(train)
"""
REFUSED = {
    "the norm of the weights": (
        "norm = torch.cat([p.flatten() for p in network.parameters()]).norm().item()",
        "network(batch).sum() / norm",
    ),
    "outputs of the epoch's beginning": (
        "soft = network(x).detach()",
        "mse_loss(network(x), soft)",
    ),
    "an anchor": (
        "anchor = {n: p.detach().clone() for n, p in network.named_parameters()}",
        "sum((p - anchor[n]).pow(2).sum() for n, p in network.named_parameters())",
    ),
    "a parameter of the module": (
        "before = network.weight.detach().clone()",
        "(network.weight - before).pow(2).sum()",
    ),
}


@pytest.mark.parametrize(("before", "loss"), REFUSED.values(), ids=REFUSED)
def test_a_value_of_the_weights_with_which_the_loop_trains_is_refused(
    tmp_path: Path, before: str, loss: str
) -> None:
    text = TRAIN.format(before=before, loss=loss)
    name = before.partition(" ")[0]
    with pytest.raises(TrainingError, match="computed from the weights") as refused:
        run_script(tmp_path, text)
    assert f"if loader.index == 0: run.state['{name}'] = …" in str(refused.value)
    run_script(tmp_path, text, ignored={name})


def test_so_is_one_before_the_outermost_loop_of_a_function_that_is_called_again(
    tmp_path: Path,
) -> None:
    text = """
def train():
    with torch.no_grad():
        start = mse_loss(network(x), y)
    for batch in loader:
        (network(batch).sum() / start).backward()
"""
    with pytest.raises(TrainingError, match=r"if 'start' not in run\.state"):
        run_script(tmp_path, text + "retry(train)")


CORRECT = {
    "the weights themselves": (
        "weights = [p for p in network.parameters()]",
        "sum(p.sum() for p in weights)",
    ),
    "their number": (
        "count = sum(p.numel() for p in network.parameters())",
        "network(batch).sum() / count",
    ),
    "an evaluation that decides nothing": (
        "error = mse_loss(network(x), y).item()",
        "network(batch).sum()).backward() or state.update(error=error) or (network(x).sum()",
    ),
    "what the state keeps": (
        'state["soft"] = network(x).detach()',
        'mse_loss(network(x), state["soft"])',
    ),
    "what does not depend on the weights": (
        "target = torch.ones(1)",
        "mse_loss(network(x).mean(0), target)",
    ),
}


@pytest.mark.parametrize(("before", "loss"), CORRECT.values(), ids=CORRECT)
def test_other_variables_are_accepted(tmp_path: Path, before: str, loss: str) -> None:
    run_script(tmp_path, TRAIN.format(before=before, loss=loss))


def test_a_function_that_is_called_in_each_epoch_computes_it_at_the_epochs_beginning(
    tmp_path: Path,
) -> None:
    text = """
def one_epoch(model):
    norm = model.weight.norm().item()
    for batch in loader:
        (network(batch).sum() / norm).backward()
def train():
    for epoch in range(2):
        one_epoch(model=network)
retry(train)
"""
    with pytest.raises(TrainingError, match=r"if loader\.index == 0: "):
        run_script(tmp_path, text)


ELSEWHERE = {
    "an attribute, by a method": """
class Trainer:
    def snapshot(self):
        self.anchor = [p.detach().clone() for p in network.parameters()]
    def training_step(self, batch):
        loss = network(batch).sum()
        for p, q in zip(network.parameters(), self.anchor):
            loss = loss + (p - q).pow(2).sum()
        loss.backward()
    def fit(self):
        for epoch in range(2):
            self.snapshot()
            for batch in loader:
                self.training_step(batch)
retry(Trainer().fit)
""",
    "an argument, by a function": """
def snapshot(model):
    copies = []
    for p in model.parameters():
        copies.append(p.detach().clone())
    return copies
def one_epoch(anchor):
    for batch in loader:
        loss = network(batch).sum()
        for p, q in zip(network.parameters(), anchor):
            loss = loss + (p - q).pow(2).sum()
        loss.backward()
def train():
    for epoch in range(2):
        one_epoch(snapshot(network))
retry(train)
""",
    "entries of a dict": """
def train():
    for epoch in range(2):
        fisher = {}
        for n, p in network.named_parameters():
            fisher[n] = p.detach().square()
        for batch in loader:
            (network(batch).sum() + sum(f.sum() for f in fisher.values())).backward()
retry(train)
""",
}


@pytest.mark.parametrize("text", ELSEWHERE.values(), ids=ELSEWHERE)
def test_functions_and_methods_may_compute_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(TrainingError, match=r"if loader\.index == 0: "):
        run_script(tmp_path, text)


OBJECTS = {
    "an optimizer of some parameters": """
def create(model):
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD([{"params": params}], lr=0.1)
def train():
    optimizer = create(network)
    for batch in loader:
        network(batch).sum().backward()
        optimizer.step()
retry(train)
""",
    "parameters whose gradients are clipped": """
class Trainer:
    def fit(self):
        self.params = list(network.parameters())
        names = [n for n, p in network.named_parameters()]
        for batch in loader:
            network(batch).sum().backward()
            nn.utils.clip_grad_norm_(self.params, 1.0)
retry(Trainer().fit)
""",
    "an evaluation that is printed": """
def evaluate(model):
    return mse_loss(model(x), y).item()
def train():
    for epoch in range(2):
        before = evaluate(network)
        for batch in loader:
            network(batch).sum().backward()
        print(before, evaluate(network))
retry(train)
""",
}


@pytest.mark.parametrize("text", OBJECTS.values(), ids=OBJECTS)
def test_references_to_weights_are_accepted(tmp_path: Path, text: str) -> None:
    run_script(tmp_path, text)


@pytest.mark.parametrize(("used", "is_refused"), [("weights", False), ("old", True)])
def test_shards_of_weights_are_compared(tmp_path: Path, used: str, is_refused: bool) -> None:
    """A DTensor has no memory of its own."""
    text = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
    def train():
        weights = [p for p in network.parameters()]
        old = [p.detach().clone() for p in network.parameters()]
        for batch in loader:
            network.weight.grad = USED[0].detach()
    retry(train)
finally:
    dist.destroy_process_group()
"""
    if not is_refused:
        run_script(tmp_path, text.replace("USED", used))
        return
    with pytest.raises(TrainingError, match="computed from the weights"):
        run_script(tmp_path, text.replace("USED", used))


@pytest.mark.parametrize(
    ("value", "is_refused"), [("output.detach()", True), ("batch.square()", False)]
)
def test_a_cache_of_outputs_is_carried(tmp_path: Path, value: str, is_refused: bool) -> None:
    """Where the loop resumes, the weights are other ones than those of the first epoch."""
    text = f"""
first = {{}}
def train():
    for batch in loader:
        output = network(batch)
        if 0 not in first:
            first[0] = {value}
        mse_loss(output, first[0].sum() + output * 0).backward()
retry(train)
"""
    if not is_refused:
        run_script(tmp_path, text)
        return
    with pytest.raises(TrainingError, match="first restarts or differs"):
        run_script(tmp_path, text)


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [
        ("network(batch).detach()", True),
        ("batch.mean(0)", True),
        ("torch.ones(batch.shape)", False),
        ("torch.arange(2.0)", False),
    ],
)
def test_a_value_of_the_first_step_is_carried(tmp_path: Path, value: str, is_refused: bool) -> None:
    """Losses by which others are divided, or the mean of the first batch: where the loop resumes,
    the first step is another one."""
    text = f"""
def train():
    first = None
    for batch in loader:
        if first is None:
            first = {value}
        (network(batch) * first).sum().backward()
retry(train)
"""
    if not is_refused:
        run_script(tmp_path, text)
        return
    with pytest.raises(TrainingError, match="first restarts or differs"):
        run_script(tmp_path, text)
