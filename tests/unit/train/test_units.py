"""Work between steps (``run.once``), ``run.commit`` in a loop, several calls of ``run.retry``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from kit.run_kit import STEPS_PER_EPOCH, Job, job, parts_of, process, run_of, steps_of_job

import checkpoints
from elastic.errors import ConfigError, TrainingError
from elastic.train import rollback
from elastic.train.folder import Checkpoints
from elastic.train.run import Run


def times_called(calls: list[str], name: str) -> Callable[[], int]:
    def work() -> int:
        calls.append(name)
        return len(calls)

    return work


def test_each_call_does_its_work_in_an_undisturbed_run() -> None:
    calls: list[str] = []
    with process() as run:
        script = job(run)

        def train() -> None:
            assert run.once("start", times_called(calls, "start")) == 1
            for _ in run.epochs(2):
                for x, y in script.loader:
                    script.update(x, y)
                values = [run.once("end", times_called(calls, "end")) for _ in range(2)]
                assert values[1] == values[0] + 1

        run.retry(train)
        assert steps_of_job(run) == 2 * STEPS_PER_EPOCH
    assert calls == ["start", "end", "end", "end", "end"]


def test_work_with_the_same_place_is_done_once() -> None:
    calls: list[str] = []
    with process() as run:
        job(run)

        def train() -> None:
            for at in (1, 1, "x", 1):
                run.once("save", times_called(calls, str(at)), at=at)

        run.retry(train)
    assert calls == ["1", "x", "1"], "the last finished work of a name counts"


def test_a_place_that_the_script_changes_before_its_loop_is_refused() -> None:
    """Each call of the function would name another one."""
    with process() as run:
        script = job(run)

        def train(*, is_first: bool) -> None:
            run.state.setdefault("round", 0)
            if run.state.setdefault("due", 1):
                run.once("due", lambda: None, at=run.state["due"])
                run.state["due"] = 0
            if is_first:
                run.once("start", lambda: None, at=run.state["round"])
                run.state["round"] += 1
            for _ in run.epochs(2):
                for x, y in script.loader:
                    script.update(x, y)
                run.once("end", lambda: None, at=f"round {run.state['round']}")
                run.state["round"] += 1

        with pytest.raises(TrainingError, match=r"run\.state\['round'\], which has changed"):
            run.retry(train, is_first=True)
        assert steps_of_job(run) == 0
    with process() as run:
        script = job(run)
        run.retry(train, is_first=False)
        assert run.state["round"] == 2


def changed_after_the_call(run: Run) -> None:
    number = run.state["round"]
    run.once("start", lambda: None, at=number)
    run.state["round"] += 1


def changed_before_the_call(run: Run) -> None:
    number = run.state.get("round", 0)
    run.state["round"] += 1
    run.once("start", lambda: None, at=number)


def part_of_a_name(run: Run) -> None:
    number = run.state["round"] + 1
    run.once("start", lambda: None, at=f"round {number}")
    run.state["round"] += 1


def changed_by_the_work(run: Run) -> None:
    """Where the function is called again, the entry is shown as it was before the work."""
    number = run.state["round"]
    run.once("start", lambda: run.state.update(round=number + 1), at=number)


def due_by_the_state(run: Run) -> None:
    due = run.state["round"]
    if due == 0:
        run.once("start", lambda: None, at=due)
        run.state["round"] = 1


def unchanged(run: Run) -> None:
    number = run.state["round"]
    run.once("start", lambda: None, at=number)
    run.state["other"] = number


@pytest.mark.parametrize(
    ("begin", "is_refused"),
    [
        (changed_after_the_call, True),
        (changed_before_the_call, True),
        (part_of_a_name, True),
        (changed_by_the_work, False),
        (due_by_the_state, False),
        (unchanged, False),
    ],
)
def test_a_place_in_a_variable_is_that_of_the_entry_from_which_it_comes(
    begin: Callable[[Run], None], is_refused: bool
) -> None:
    with process() as run:
        script = job(run)
        run.state["round"] = 0

        def train() -> None:
            begin(run)
            for _ in run.epochs(1):
                for x, y in script.loader:
                    script.update(x, y)

        if is_refused:
            with pytest.raises(TrainingError, match=r"run\.state\['round'\], which has changed"):
                run.retry(train)
            assert steps_of_job(run) == 0
        else:
            run.retry(train)
            assert steps_of_job(run) == STEPS_PER_EPOCH


def test_a_place_may_change_after_the_loop_where_the_function_resumes(tmp_path: Path) -> None:
    """From there on, each call of the function changes it again."""
    places: list[int] = []

    def train(script: Job, *, fails: bool) -> None:
        state = script.run.state
        state.setdefault("epoch", 0)

        def examine() -> None:
            if fails:
                raise ValueError("in the work")
            places.append(epoch)

        while (epoch := state["epoch"]) < 2:
            for x, y in script.loader:
                script.update(x, y)
            state["epoch"] += 1
            script.run.once("examine", examine, at=epoch)

    policy = Checkpoints(folder=tmp_path, when=100)
    error = "ValueError: in the work"
    with run_of(policy, clean=False, error=error) as run, pytest.raises(ValueError, match="work"):
        run.retry(train, job(run), fails=True)
    with process(tmp_path) as run:
        run.retry(train, job(run), fails=False)
        assert steps_of_job(run) == 2 * STEPS_PER_EPOCH
    assert places == [0, 1]


def test_work_in_a_step_is_a_part_of_it() -> None:
    calls: list[str] = []
    with process() as run:
        script = job(run)
        for _ in run.epochs(1):
            for x, y in script.loader:
                script.update(x, y)
                run.once("work", times_called(calls, "work"))
        assert parts_of(run).session.job.units == {}
    assert len(calls) == STEPS_PER_EPOCH


def test_work_is_not_repeated_after_a_resumption_that_has_it(tmp_path: Path) -> None:
    """A checkpoint of the step after which it was done: saved before the next step begins."""
    calls: list[str] = []

    def train(script: Job, stop_after: int) -> None:
        for _ in script.run.epochs(2):
            for x, y in script.loader:
                script.update(x, y)
                if steps_of_job(script.run) == stop_after:
                    raise ConnectionError("connection closed by peer")
            script.run.once("end", times_called(calls, "end"))
            script.run.state["calls"] = len(calls)

    with process(tmp_path, every_steps=1, clean=False) as run, pytest.raises(ConnectionError):
        run.retry(train, job(run), STEPS_PER_EPOCH)
    with process(tmp_path, every_steps=1) as run:
        run.retry(train, job(run), -1)
        assert run.state["calls"] == 2
    assert calls == ["end", "end"]


def test_a_counter_that_finished_work_has_changed_does_not_lead_past_its_loop(
    tmp_path: Path,
) -> None:
    policy = Checkpoints(folder=tmp_path, when=100)
    evaluated: list[int] = []
    ended: list[tuple[int, int]] = []

    def train(script: Job, *, fails: bool) -> None:
        state = script.run.state
        state.setdefault("epoch", 0)

        def evaluate() -> None:
            evaluated.append(state["epoch"])
            state["epoch"] += 1

        for epoch in range(state["epoch"], 3):
            for x, y in script.loader:
                script.update(x, y)
            script.run.once("evaluate", evaluate)
            if fails:
                raise ValueError("after the evaluation")
            ended.append((epoch, state["epoch"]))

    error = "ValueError: after the evaluation"
    with run_of(policy, clean=False, error=error) as run, pytest.raises(ValueError, match="after"):
        run.retry(train, job(run), fails=True)
    with process(tmp_path) as run:
        script = job(run)
        run.retry(train, script, fails=False)
        assert steps_of_job(run) == 3 * STEPS_PER_EPOCH
        assert script.run.state == {"epoch": 3}
    assert (evaluated, ended) == ([0, 1, 2], [(0, 1), (1, 2), (2, 3)])


def test_what_the_script_changes_before_it_is_not_committed_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That code is executed again: weights that it exchanges are still those of the last step."""
    monkeypatch.setattr(rollback, "COPY_IS_CHEAP_S", math.inf)  # on a slow machine, too
    with process(tmp_path) as run:
        script = job(run)
        run.state.update(count=0, found=0)

        def swap() -> None:
            with torch.no_grad():
                for parameter in script.model.parameters():
                    parameter.mul_(2.0)

        def work() -> None:
            run.state["found"] += 1

        def train() -> None:
            for _ in run.epochs(1):
                for x, y in script.loader:
                    script.update(x, y)
                trained = script.weights()
                swap()
                run.state["count"] += 1
                run.once("evaluate", work)
                assert parts_of(run).session.progress.rollback.restore()
                assert torch.equal(script.weights(), trained)
                assert (run.state["count"], run.state["found"]) == (0, 1)
                run.once("evaluate", work)

        run.retry(train)


def test_changes_of_interrupted_work_are_undone(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        run.state["found"] = 0

        def work() -> None:
            run.state["found"] += 1
            with torch.no_grad():
                for parameter in script.model.parameters():
                    parameter.zero_()
            raise ConnectionError("connection closed by peer")

        def train() -> None:
            for _ in run.epochs(1):
                for x, y in script.loader:
                    script.update(x, y)
                trained = script.weights()
                with pytest.raises(ConnectionError):
                    run.once("evaluate", work)
                assert parts_of(run).session.progress.rollback.restore()
                assert torch.equal(script.weights(), trained)
                assert run.state["found"] == 0

        run.retry(train)


@pytest.mark.parametrize("value", [object(), lambda: None, {"loss": object()}])
def test_a_value_that_cannot_be_kept_is_refused(value: object) -> None:
    with process() as run:
        job(run)
        with pytest.raises(TrainingError, match=r"run\.once\('evaluate'\): the value"):
            run.retry(lambda: run.once("evaluate", lambda: value))


def test_a_function_that_trains_is_refused() -> None:
    with process() as run:
        script = job(run)
        with pytest.raises(TrainingError, match="has trained a step"):
            run.retry(lambda: run.once("evaluate", script.train))


def test_a_call_that_is_no_call_is_refused() -> None:
    with process() as run:
        wrong: Any = "evaluate()"
        with pytest.raises(ConfigError, match=r"run\.once"):
            run.once("evaluate", wrong)
        with pytest.raises(ConfigError, match=r"run\.once"):
            run.once(cast(Any, print), print)


# -- run.commit in a loop --------------------------------------------------------------------------


@pytest.mark.parametrize("has_all", [True, False])
def test_a_step_ends_where_the_script_commits_it(has_all: bool) -> None:
    def train(script: Job, *, commits: bool) -> list[int]:
        counts = []
        for _ in script.run.epochs(2):
            for i, (x, y) in enumerate(script.loader):
                script.update(x, y)
                if commits and (has_all or i % 2):
                    script.run.commit()
                    script.run.commit()  # no current step: no effect
                    torch.rand(3)
                counts.append(steps_of_job(script.run))
        return counts

    with process() as run:
        plain = job(run)
        train(plain, commits=False)
        expected = plain.weights()
    with process() as run:
        script = job(run)
        counts = train(script, commits=True)
        assert torch.equal(script.weights(), expected)
    before = 1 if has_all else 0
    assert counts[::2] == [n + before for n in range(0, 2 * STEPS_PER_EPOCH, 2)]
    assert counts[1::2] == [n + 1 for n in range(1, 2 * STEPS_PER_EPOCH, 2)]


def test_changes_after_the_commit_belong_to_no_step(tmp_path: Path) -> None:
    with process(tmp_path) as run:
        script = job(run)
        run.state["after"] = 0
        for _ in run.epochs(1):
            for i, (x, y) in enumerate(script.loader):
                script.update(x, y)
                run.commit()
                run.state["after"] += 1
                if i == 3:
                    assert parts_of(run).session.progress.rollback.restore()
                    assert run.state["after"] == 3
                    assert steps_of_job(run) == 4


def test_a_loop_may_be_left_after_the_commit() -> None:
    with process() as run:
        script = job(run)
        for _ in run.epochs(2):
            for i, (x, y) in enumerate(script.loader):
                script.update(x, y)
                run.commit()
                if i == 2:
                    break
        assert steps_of_job(run) == 6


# -- several calls of run.retry --------------------------------------------------------------------


def test_only_the_end_of_the_last_call_saves(tmp_path: Path) -> None:
    with process(tmp_path, every_steps=1000) as run:
        script = job(run)

        def train() -> None:
            for x, y in script.loader:
                script.update(x, y)

        for _ in range(3):
            run.retry(train, is_last=False)
        assert not parts_of(run).session.checkpoints.wait(0.0) or not list(
            checkpoints.list_checkpoints(tmp_path)
        )
        run.once("report", lambda: run.state.update(reports=1))
    (saved,) = checkpoints.list_checkpoints(tmp_path)
    assert saved.step == 3 * STEPS_PER_EPOCH


def test_interrupted_work_that_is_not_called_again_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ConnectionError("connection closed by peer")

    with process() as run, caplog.at_level(logging.WARNING):
        script = job(run)
        for _ in run.epochs(1):
            for i, (x, y) in enumerate(script.loader):
                script.update(x, y)
                run.commit()
                if i == 2:
                    with pytest.raises(ConnectionError):
                        run.once("evaluate", fail)
    assert "run.once('evaluate') was interrupted after 3 steps" in caplog.text
