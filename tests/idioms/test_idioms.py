"""Everyday training scripts: what a death at a random line of them changes is nothing."""

from __future__ import annotations

import pytest
from catalogue import REFUSED, Idiom, idioms
from idiom_runs import SIZE, IdiomRuns, assert_same

from elastic.testing.small_world import CALLS, LINES

SOAK_SEEDS = range(2, 32)


def name_of(idiom: Idiom) -> str:
    return idiom.name


@pytest.mark.parametrize("idiom", idioms(), ids=name_of)
def test_three_workers_train_like_one(runs: IdiomRuns, idiom: Idiom) -> None:
    outcome = runs.undisturbed(idiom)
    outcome.assert_success(workers=SIZE)
    assert_same(idiom, outcome, runs.alone(idiom))


@pytest.mark.parametrize("is_replaced", [False, True], ids=["two go on", "replaced"])
@pytest.mark.parametrize("idiom", idioms(), ids=name_of)
def test_a_death_at_a_random_line_changes_nothing(
    runs: IdiomRuns, idiom: Idiom, is_replaced: bool
) -> None:
    check_death(runs, idiom, int(is_replaced), LINES, is_replaced=is_replaced)


@pytest.mark.soak
@pytest.mark.parametrize("counted", [LINES, CALLS])
@pytest.mark.parametrize("seed", SOAK_SEEDS)
@pytest.mark.parametrize("idiom", idioms(), ids=name_of)
def test_a_death_anywhere_changes_nothing(
    runs: IdiomRuns, idiom: Idiom, seed: int, counted: str
) -> None:
    check_death(runs, idiom, seed, counted, is_replaced=seed % 2 == 1)


def check_death(
    runs: IdiomRuns, idiom: Idiom, seed: int, counted: str, *, is_replaced: bool
) -> None:
    death = runs.draw_death(idiom, seed, counted)
    outcome = runs.with_death(idiom, death, is_replaced=is_replaced)
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert outcome.died_at, f"{death} was not reached"
    assert_same(idiom, outcome, runs.alone(idiom))


@pytest.mark.parametrize("idiom", idioms(REFUSED), ids=name_of)
def test_what_cannot_be_right_is_refused(runs: IdiomRuns, idiom: Idiom) -> None:
    (worker,) = runs.alone(idiom).workers
    assert worker.exit_code == 1, worker.log
    assert idiom.refusal
    assert idiom.refusal in worker.log
