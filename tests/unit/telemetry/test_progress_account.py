"""The progress account that each agent keeps: goodput, and the last checkpoint."""

from __future__ import annotations

import pytest

from elastic.telemetry.ledger import ProgressAccount

STEP_S = 0.5


def test_goodput_is_undefined_before_the_first_step() -> None:
    account = ProgressAccount(0.0)
    account.note(10.0, None, STEP_S, None)
    assert account.goodput(10.0) is None
    account.note(20.0, 100, STEP_S, None)  # a restored job: its steps were committed before
    assert account.goodput(20.0) is None


def test_goodput_counts_step_time_and_not_idle_time() -> None:
    account = ProgressAccount(0.0)
    account.note(10.0, 0, STEP_S, None)
    account.note(20.0, 20, STEP_S, None)
    assert account.goodput(20.0) == pytest.approx(0.5)
    account.note(40.0, 20, STEP_S, None)  # nothing is committed: a recovery
    assert account.goodput(40.0) == pytest.approx(0.25)


def test_step_time_is_limited_to_the_elapsed_time() -> None:
    account = ProgressAccount(0.0)
    account.note(1.0, 0, STEP_S, None)
    account.note(2.0, 1000, STEP_S, None)
    assert account.goodput(2.0) == pytest.approx(0.5)


def test_steps_discarded_by_a_recovery_do_not_count() -> None:
    account = ProgressAccount(0.0)
    account.note(0.0, 0, STEP_S, None)
    for number in range(1, 11):
        account.note(number, 2 * number, STEP_S, None)
    assert account.goodput(10.0) == pytest.approx(1.0)
    account.note(12.0, 12, STEP_S, None)  # from the checkpoint of step 12
    assert account.goodput(12.0) == pytest.approx(0.5)
    account.note(13.0, 14, STEP_S, None)
    assert account.goodput(13.0) == pytest.approx(7 / 13)


def test_a_checkpoint_has_the_time_at_which_it_was_reported() -> None:
    account = ProgressAccount(0.0)
    account.note(5.0, None, STEP_S, None)
    assert (account.checkpoint_step, account.checkpoint_at_s) == (None, None)
    for now_s, step in ((6.0, 40), (8.0, 40), (10.0, 80)):
        account.note(now_s, step, STEP_S, step)
    assert account.checkpoint_step == 80
    assert account.checkpoint_at_s == 10.0
