"""Counters in local variables of the training function."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.telemetry.log import get_logger
from elastic.train import checks
from elastic.train.checks import warn_of_local_state


class Loader:
    """Calls the check when the first step begins, as the loop over steps does."""

    def __iter__(self) -> Iterator[int]:
        warn_of_local_state()
        yield from range(4)


def retry(function: Callable[[], Any]) -> None:
    function()


@pytest.fixture
def warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """The warnings of a script whose loops over ``loader`` are steps."""
    own = {retry.__code__, Loader.__iter__.__code__}
    original = vars(checks)["is_own"]
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))
    monkeypatch.setattr(get_logger(), "propagate", True)

    def run(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        runpy.run_path(str(path), init_globals={"retry": retry, "loader": Loader(), "limit": 3})
        return caplog.text

    return run


COUNTS = {
    "a limit of steps": """
def train():
    n = 0
    for epoch in range(2):
        for batch in loader:
            n += 1
            if n >= limit:
                break
        if n >= limit:
            break
retry(train)
""",
    "a limit of updates": """
def train():
    n = 0
    for i, batch in enumerate(loader):
        if i % 2 == 1:
            n += 1
        if n == limit:
            return
retry(train)
""",
    "a while loop": """
def train():
    n = 0
    while n < limit:
        for batch in loader:
            n += 1
retry(train)
""",
    "patience": """
def train():
    n = 0
    for epoch in range(5):
        for batch in loader:
            pass
        if epoch < 2:
            n = 0
        else:
            n += 1
        if n > 1:
            break
retry(train)
""",
    "a limit in each epoch": """
def train():
    for epoch in range(2):
        n = 0
        for batch in loader:
            n += 1
            if n >= limit:
                break
retry(train)
""",
    "a sequence length": """
def train():
    n = 0
    for batch in loader:
        length = min(8, 2 + n // 2)
        n += 1
retry(train)
""",
    "a condition": """
def train():
    n = 0
    for batch in loader:
        if n > limit:
            average = batch
        n += 1
retry(train)
""",
}
HARMLESS = {
    "printed": """
def train():
    n = 0
    for batch in loader:
        n += 1
        if n % 2 == 0:
            print(n, f"{n / 3}", "%d" % (n + 1))
retry(train)
""",
    "a mean": """
def train():
    n, total = 0, 0.0
    n = 0
    for batch in loader:
        n += 1
        total += batch
        mean = total / n
retry(train)
""",
    "an accumulation": """
def train():
    n = 0
    for batch in loader:
        n += 1
        if n % 2 == 0:
            step = batch
retry(train)
""",
    "an accumulation that is reset": """
def train():
    n = 0
    for batch in loader:
        n += 1
        if n >= 2:
            n = 0
retry(train)
""",
    "from the state": """
state = {"n": 0}
def train():
    n = state["n"]
    for batch in loader:
        n += 1
        state["n"] = n
        if n >= limit:
            break
retry(train)
""",
    "within a step": """
def train():
    for batch in loader:
        n = 0
        while n < limit:
            n += 1
retry(train)
""",
    "without run.retry": """
def train():
    n = 0
    for batch in loader:
        n += 1
        if n >= limit:
            break
train()
""",
}


@pytest.mark.parametrize("text", COUNTS.values(), ids=COUNTS)
def test_a_count_that_training_depends_on_causes_a_warning(
    warnings: Callable[[str], str], text: str
) -> None:
    assert "n counts from 0 again when run.retry calls its function again" in warnings(text)


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_other_counts_cause_no_warning(warnings: Callable[[str], str], text: str) -> None:
    assert not warnings(text)
