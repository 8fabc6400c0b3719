"""Copies of the trained weights that the function of run.retry makes before its loop."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.train import checks
from elastic.train.checks import refuse_copies

HEAD = """
import copy
from torch import nn

policy = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
model = nn.ModuleDict({"module": policy})
frozen = nn.Linear(2, 1).requires_grad_(False)

"""


class Loader:
    """Calls the check when the first step begins, as the loop over steps does."""

    def __init__(self, modules: list[nn.Module], call: list[tuple[str, object]]) -> None:
        self.modules, self.call = modules, call

    def __iter__(self) -> Iterator[torch.Tensor]:
        refuse_copies(self.modules, self.call)
        yield torch.zeros(1, 2)


def run_script(tmp_path: Path, text: str) -> None:
    """Run a script that calls ``retry(train, …)``, in which loops over ``loader`` are steps."""
    loader = Loader([], [])

    def retry(function: Callable[..., Any], *arguments: object) -> None:
        script = function.__globals__
        code = getattr(function, "__func__", function).__code__
        names = code.co_varnames[hasattr(function, "__self__") : code.co_argcount]
        loader.modules[:] = [script["policy"]]
        loader.call[:] = [("", function), *zip(names, arguments, strict=False)]
        function(*arguments)

    own.update({retry.__code__, Loader.__iter__.__code__})
    path = tmp_path / "script.py"
    path.write_text(HEAD + text)
    runpy.run_path(str(path), init_globals={"retry": retry, "loader": loader})


own: set[Any] = set()


@pytest.fixture(autouse=True)
def calls_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))


REFUSED = {
    "a reference model": """
def train():
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    for epoch in range(2):
        for batch in loader:
            reference(batch)
retry(train)
""",
    "of the module inside the wrapper": """
def train():
    reference = copy.deepcopy(model.module)
    for batch in loader:
        print(policy, reference)
retry(train)
""",
    "an anchor of a penalty": """
def train():
    anchor = {n: p.detach().clone() for n, p in policy.named_parameters()}
    for batch in loader:
        sum((p - anchor[n]).pow(2).sum() for n, p in policy.named_parameters())
retry(train)
""",
    "a copied state_dict, in a condition": """
def train():
    if frozen is not None:
        before = copy.deepcopy(policy.state_dict())
    for batch in loader:
        print(before)
retry(train)
""",
    "in a trainer": """
class Trainer:
    def __init__(self):
        self.model = policy
    def fit(self):
        self.reference = copy.deepcopy(self.model)
        for batch in loader:
            self.reference(batch)
retry(Trainer().fit)
""",
    "in a method that the function calls": """
class Trainer:
    def __init__(self):
        self.model = policy
    def fit(self):
        self.loop()
    def loop(self):
        self.reference = copy.deepcopy(self.model)
        for batch in loader:
            self.reference(batch)
retry(Trainer().fit)
""",
    "of an argument": """
def train(model):
    reference = copy.deepcopy(model)
    for batch in loader:
        reference(batch)
retry(train, policy)
""",
    "of a variable of the enclosing function": """
def main():
    network = policy
    def train():
        reference = copy.deepcopy(network)
        for batch in loader:
            reference(batch)
    retry(train)
main()
""",
}
CORRECT = {
    "before the function": """
reference = copy.deepcopy(policy)
def train():
    for batch in loader:
        reference(batch)
retry(train)
""",
    "tracked": """
def train():
    reference = copy.deepcopy(policy)
    run.track(reference=reference)
    for batch in loader:
        reference(batch)
class run:
    track = dict
retry(train)
""",
    "of a model that is created in each call": """
def train():
    policy = nn.Linear(2, 1)
    reference = copy.deepcopy(policy)
    for batch in loader:
        reference(batch)
retry(train)
""",
    "of a frozen model": """
def train():
    teacher = copy.deepcopy(frozen)
    for batch in loader:
        teacher(batch)
retry(train)
""",
    "in each epoch": """
def train():
    for epoch in range(2):
        start_of_epoch = copy.deepcopy(policy)
        for batch in loader:
            start_of_epoch(batch)
retry(train)
""",
    "not used in the loop": """
def train():
    summary = copy.deepcopy(policy)
    print(summary)
    for batch in loader:
        pass
retry(train)
""",
    "a name and not the weights": """
def train():
    names = [n for n, p in policy.named_parameters()]
    shape = copy.deepcopy(policy[0].weight.shape)
    for batch in loader:
        print(names, shape)
retry(train)
""",
    "without run.retry": """
def train():
    reference = copy.deepcopy(policy)
    for batch in loader:
        reference(batch)
loader.modules.append(policy)
train()
""",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_copy_made_in_the_function_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TrainingError, match=r"in the function of run\.retry") as refused:
        run_script(tmp_path, text)
    assert "run.track(" in str(refused.value)


@pytest.mark.parametrize("text", CORRECT.values(), ids=CORRECT)
def test_other_copies_are_not_refused(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    run_script(tmp_path, text)
    assert not caplog.records


def test_a_copy_that_may_be_overwritten_before_its_use_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a buffer for evaluations, it is correct."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    run_script(
        tmp_path,
        """
def train():
    averaged = copy.deepcopy(policy)
    for batch in loader:
        averaged.load_state_dict(policy.state_dict())
retry(train)
""",
    )
    assert "`averaged = copy.deepcopy(policy)` in the function of run.retry" in caplog.text
