"""The progress line of rank 0."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.manual_clock import ManualClock
from kit.run_kit import STEPS_PER_EPOCH, job, parts_of, process
from test_metrics_log import world

from elastic.errors import ConfigError
from elastic.hangs.page import phases
from elastic.train.loop import steps_left
from elastic.train.metrics import WorldMean
from elastic.train.observers import (
    PROGRESS_LINE_S,
    ProgressLine,
    TrainingProgress,
    progress_text,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Rank:
    """A training rank, on a manual clock."""

    def __init__(
        self, rank: int = 0, *, is_on: bool = True, out: io.StringIO | None = None
    ) -> None:
        self.clock = ManualClock(50.0)
        self.rank = rank
        self.step = 0
        self.values = {"loss": 0.5}
        self.out = io.StringIO() if out is None else out
        self.line = ProgressLine(
            lambda: self.values,
            lambda: 1000 - self.step,
            is_on=is_on,
            out=self.out,
            clock=self.clock,
        )

    def enter(self, size: int, step: int) -> None:
        self.step = step
        self.line.enter_world(world(self.rank, size), step)

    def train(self, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.clock.advance(step_s)
            self.step += 1
            self.line.commit(self.step)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The lines of the log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("elastic")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield said
    logger.removeHandler(handler)


def test_only_rank_0_logs_a_line_every_few_seconds(lines: list[str]) -> None:
    for rank in (Rank(1), Rank(0, is_on=False)):
        rank.enter(2, 0)
        rank.train(201, 0.125)
    assert not lines
    main = Rank(0)
    main.enter(2, 0)
    main.train(201, 0.125)
    assert len(lines) == 200 * 0.125 / PROGRESS_LINE_S
    assert lines[0] == (
        "step 41/1000, loss 0.5 (rank 0), 8 steps/s, 2 min 00 s left, 2 workers in generation 1"
    )
    assert main.out.getvalue() == ""


def test_the_numbers_are_correct_after_a_recovery(lines: list[str]) -> None:
    main = Rank(0)
    main.enter(4, 0)
    main.train(100, 0.125)
    main.line.leave_world("fault")
    main.clock.advance(300.0)  # not part of any step time
    main.enter(2, 90)
    main.train(1, 30.0)  # the first step of a world does not predict later ones
    assert lines[-1] == "step 91/1000, loss 0.5 (rank 0), 2 workers in generation 1"
    main.train(40, 0.25)
    assert lines[-1].startswith("step 131/1000, loss 0.5 (rank 0), 4 steps/s, 3 min 37 s left")
    assert lines[-1].endswith(", 2 workers in generation 1")
    assert not any("s/step" in line for line in lines)


def test_a_terminal_shows_one_updated_line_and_clears_it(lines: list[str]) -> None:
    terminal = Terminal()
    main = Rank(0, out=terminal)
    main.enter(1, 0)
    main.train(101, 0.125)
    shown = terminal.getvalue()
    assert not lines
    assert "\n" not in shown
    states = re.findall(r"\r(step \d+)/1000[^\r]*\x1b\[K\r", shown)
    assert len(states) == 25
    assert states[-1] == "step 101"
    main.line.leave_world("close")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_means_are_shown_first_and_values_of_one_rank_are_marked() -> None:
    def text(**values: float) -> str:
        return progress_text(
            TrainingProgress(
                step=7, steps_left=None, step_time_s=2.5, size=1, generation=2, values=values
            )
        )

    assert text(lr=0.001, loss=WorldMean(0.25)) == (
        "step 7, loss 0.25, lr 0.001 (rank 0), 2.5 s/step, 1 worker in generation 2"
    )
    assert "(rank 0)" not in text(loss=WorldMean(0.25))
    assert "v9" not in text(**{f"v{i}": 0.0 for i in range(10)})


def test_steps_left_follow_epochs_and_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> int | None:
        return steps_left(parts_of(run).session.scope, parts_of(run).session.job)

    with process(tmp_path) as run:
        script, seen = job(run), list[int | None]()
        profiler = parts_of(run).profiler  # a hook that sees each step
        monkeypatch.setattr(profiler, "commit", lambda step: seen.append(left()))
        for _ in run.epochs(3):
            for x, y in script.loader:
                script.update(x, y)
        assert left() is None
    whole = 3 * STEPS_PER_EPOCH
    assert seen == list(range(whole - 1, -1, -1)), "as a hook sees it"


def test_steps_left_follow_planned_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a script that counts epochs itself, or has several loaders, and sets the number."""
    monkeypatch.setattr(phases, "planned_steps", 0)
    with process(tmp_path) as run:
        script, seen = job(run), list[int | None]()
        at = parts_of(run)
        monkeypatch.setattr(
            at.profiler,
            "commit",
            lambda step: seen.append(steps_left(at.session.scope, at.session.job)),
        )
        for no_number in (0, -5, 1.5, True, "9"):
            with pytest.raises(ConfigError, match="is not a valid step count"):
                run.plan_steps(no_number)  # type: ignore[arg-type]
        assert phases.planned_steps == 0
        run.plan_steps(STEPS_PER_EPOCH + 3)
        assert phases.planned_steps == STEPS_PER_EPOCH + 3, "for the agent, and elastic status"
        for x, y in script.loader:
            script.update(x, y)
        assert seen == list(range(STEPS_PER_EPOCH + 2, 2, -1))
        for _ in run.epochs(2):  # the script's own number is kept
            for x, y in script.loader:
                script.update(x, y)
                assert phases.planned_steps == STEPS_PER_EPOCH + 3
    assert seen[-1] == 0, "never negative"


def test_an_invalid_setting_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_PROGRESS", "no")
    with pytest.raises(ConfigError, match="ELASTIC_PROGRESS=no"), process():
        pass
