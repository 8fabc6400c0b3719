"""SIGTERM stops the main thread only where the state of the last commit can be restored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic.train.current import CurrentStep, Listeners
from elastic.train.loop import Commits
from elastic.train.optimizers import Registry
from elastic.train.preemption import Preemption
from elastic.train.progress import RankProgress
from elastic.train.session import Scope, Session, StepCallbacks
from elastic.train.step import Step


class Rank:
    """The only rank of a world, in process, which asks at several points whether it may stop."""

    def __init__(self) -> None:
        self.answers: dict[str, bool] = {}
        current = CurrentStep()
        registry = Registry(seed=0, inside=lambda: current.inside)
        registry.job.track("tracked", SimpleNamespace(state_dict=dict, load_state_dict=lambda _: 0))
        active = SimpleNamespace(
            can_roll_back=True,
        )
        lifecycle = SimpleNamespace(
            is_changing=False,
            world=SimpleNamespace(generation=1, rank=0, size=1),
            synchronize=lambda: None,
        )
        flags = SimpleNamespace(has_different_weights=False)
        self.session = Session(
            registry=registry,
            current=current,
            progress=RankProgress(registry.job, registry.optimizer_watch, current),
            timer=cast(
                Any, SimpleNamespace(committed=lambda _: self.ask("committed"), is_slow=False)
            ),
            scope=Scope(),
            callbacks=StepCallbacks(),
            listeners=Listeners(),
            group=cast(Any, None),
            lifecycle=cast(Any, lifecycle),
            worlds=None,
            checkpoints=cast(
                Any, SimpleNamespace(step_ended=lambda: self.ask("dropped"), flags=flags)
            ),
            halt=cast(Any, None),
            ledger=cast(Any, SimpleNamespace(is_on=True, step=lambda **_: self.ask("noting"))),
            journal=cast(Any, None),
            hooks=cast(Any, SimpleNamespace(commit=lambda _: self.ask("committing"))),
        )
        self.session.strategy = cast(Any, active)
        self.session.callbacks.add(lambda _: self.ask("in a callback"))
        self._preemption = Preemption(self.session)
        self.commits = Commits(self.session)

    def ask(self, at: str) -> None:
        self.answers[at] = self._preemption.may_stop_here()

    def train(self) -> None:
        """A step with an update, up to the end of its commit."""
        self.ask("between steps")
        step = Step.past(0, 0, 0, 1)
        self.session.current.begin(step, None)
        self.ask("before the update")
        step.stepped.append("optimizer")
        self.ask("after the update")
        self.commits.commit(step, None)


def test_a_commit_is_not_interrupted_between_an_update_and_its_snapshot() -> None:
    rank = Rank()
    rank.train()
    assert rank.answers == {
        "between steps": True,
        "before the update": True,
        "after the update": True,
        "dropped": False,
        "committing": False,
        "noting": False,
        "in a callback": True,
        "committed": True,
    }


def test_the_commit_of_an_open_accumulation_is_not_interrupted() -> None:
    rank = Rank()
    rank.session.current.accumulation.add(Step.past(0, 0, 0, 1))
    rank.commits.finish()
    assert rank.answers == {"noting": False, "in a callback": True, "committed": True}


def test_a_failed_commit_does_not_forbid_to_stop_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    monkeypatch.setattr(rank, "ask", _fail)
    step = Step.past(0, 0, 0, 1)
    rank.session.current.begin(step, None)
    with pytest.raises(OSError, match="dropped"):
        rank.commits.commit(step, None)
    assert not rank.session.current.is_committing


def _fail(at: str) -> None:
    raise OSError(at)
