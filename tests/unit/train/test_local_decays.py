"""Variables that decay from step to step, outside of the job's state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger
from elastic.train import checks

DECAY = 0.99
ratio = 1.0
state: dict[str, float] = {}
is_saved = [False]


def loader() -> Iterator[float]:
    """Looks when a step begins, as the loop over steps does."""
    checks.refuse_decays(sys._getframe(1), is_saved=is_saved[0])
    yield from (0.5, 0.25)


def train_on(*values: float) -> float:
    return sum(values)


def multiplied() -> None:
    epsilon = 1.0
    for batch in loader():
        train_on(batch, epsilon)
        epsilon *= DECAY


def bounded() -> None:
    epsilon = 1.0
    for _epoch in range(2):
        for batch in loader():
            train_on(batch, epsilon)
            epsilon = max(0.1, epsilon - 0.3)


def annealed() -> None:
    beta = 0.0
    for batch in loader():
        train_on(batch, beta)
        beta += 0.1


def of_the_module() -> None:
    global ratio
    for batch in loader():
        train_on(batch, ratio)
        ratio = ratio * DECAY


@pytest.fixture(autouse=True)
def is_called_by_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take ``retry`` and the loader of this file for the package's."""
    own = {retry.__code__, loader.__code__}
    original = checks.is_own
    monkeypatch.setattr(get_logger(), "propagate", True)
    monkeypatch.setattr(checks, "is_own", lambda code: code in own or original(code))


def retry(train: Callable[[], object]) -> None:
    train()


@pytest.mark.parametrize(
    ("train", "update"),
    [
        (multiplied, "epsilon *= DECAY"),
        (bounded, "epsilon = max(0.1, epsilon - 0.3)"),
        (of_the_module, "ratio = ratio * DECAY"),
    ],
)
def test_a_decay_is_refused(train: Callable[[], object], update: str) -> None:
    with pytest.raises(TrainingError) as refused:
        retry(train)
    assert f"`{update}` in {train.__name__}: after a death" in str(refused.value)
    assert "run.state.setdefault(" in str(refused.value)


def test_a_sum_of_constants_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a count of samples for a throughput, on which nothing depends."""
    retry(annealed)
    assert "`beta += 0.1` in annealed: after a death" in caplog.text


def test_a_decay_without_run_retry_restarts_only_from_a_checkpoint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied()
    assert not caplog.text
    monkeypatch.setattr(sys.modules[__name__], "is_saved", [True])
    with pytest.raises(TrainingError, match="a restarted job resumes from its last checkpoint"):
        multiplied()


def a_count() -> None:
    steps = 0
    batches = loader()
    while steps < 2:
        train_on(next(batches), steps)
        steps += 1


def a_sum() -> None:
    total = 0.0
    for batch in loader():
        total += train_on(batch)
    train_on(total)


def a_running_mean() -> None:
    mean = 0.0
    for batch in loader():
        loss = train_on(batch, mean)
        mean = 0.9 * mean + 0.1 * loss


def a_scaled_loss() -> None:
    for batch in loader():
        loss = train_on(batch)
        loss *= 0.5
        train_on(loss)


def only_printed() -> None:
    epsilon = 1.0
    for batch in loader():
        train_on(batch)
        print(epsilon)
        epsilon *= DECAY


def shown_in_a_text() -> None:
    epsilon = 1.0
    for batch in loader():
        text = f"{train_on(batch)} {epsilon:.2f}"
        epsilon *= DECAY
    print(text)


def of_the_jobs_state() -> None:
    epsilon = state.get("epsilon", 1.0)
    for batch in loader():
        train_on(batch, epsilon)
        epsilon *= DECAY
        state["epsilon"] = epsilon


def in_the_jobs_state() -> None:
    state.setdefault("epsilon", 1.0)
    for batch in loader():
        train_on(batch, state["epsilon"])
        state["epsilon"] *= DECAY


def within_a_step() -> None:
    for batch in loader():
        size = 1.0
        for _ in range(3):
            train_on(batch, size)
            size *= 0.5


def a_changed_batch() -> None:
    for batch in loader():
        batch = batch / 255
        train_on(batch)


@pytest.mark.parametrize(
    "train",
    [
        a_count,
        a_sum,
        a_running_mean,
        a_scaled_loss,
        only_printed,
        shown_in_a_text,
        of_the_jobs_state,
        in_the_jobs_state,
        within_a_step,
        a_changed_batch,
    ],
)
def test_nothing_else_is_warned_of(
    train: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    retry(train)
    assert not caplog.text
