"""Common training scripts: killing a worker at a random line does not change the result."""

from __future__ import annotations

import zlib

import pytest
from catalogue import GROUPS, REFUSED, Idiom, idioms
from idiom_runs import SIZE, IdiomRuns, assert_as_undisturbed, assert_same

from elastic.testing.small_world.world import CALLS, LINES, RunOutcome

SOAK_SEEDS = range(2, 12)


def test_every_group_has_an_idiom() -> None:
    assert {idiom.directives["Group"] for idiom in idioms()} == set(GROUPS)


def name_of(idiom: Idiom) -> str:
    return idiom.name


def has_replacement(idiom: Idiom) -> bool:
    """About half of the idioms run with a replacement worker, chosen by name."""
    return zlib.crc32(idiom.name.encode()) % 2 == 1


def in_short(idiom: Idiom) -> bool:
    """A twelfth of the idioms, chosen by name: the others only in ``make test-all``."""
    return zlib.crc32(idiom.name.encode()) % 12 == 0


# The run with a death also shows that three workers train like one.
@pytest.mark.slow
@pytest.mark.parametrize(
    "idiom",
    [pytest.param(i, marks=[pytest.mark.soak] * i.is_compared_alone) for i in idioms()],
    ids=name_of,
)
def test_three_workers_train_like_a_single_worker(runs: IdiomRuns, idiom: Idiom) -> None:
    outcome = runs.undisturbed(idiom)
    outcome.assert_success(workers=SIZE)
    assert_same(idiom, outcome, runs.alone(idiom))


@pytest.mark.parametrize(
    "idiom",
    [pytest.param(i, marks=[] if in_short(i) else [pytest.mark.slow]) for i in idioms()],
    ids=name_of,
)
def test_a_death_at_a_random_line_does_not_change_the_result(runs: IdiomRuns, idiom: Idiom) -> None:
    outcome = runs.with_random_death(
        idiom, seed=0, alone=runs.alone(idiom), is_replaced=has_replacement(idiom)
    )
    check_death(runs, idiom, outcome, is_replaced=has_replacement(idiom))


@pytest.mark.soak
@pytest.mark.parametrize("counted", [LINES, CALLS])
@pytest.mark.parametrize("seed", SOAK_SEEDS)
@pytest.mark.parametrize("idiom", idioms(), ids=name_of)
def test_a_death_anywhere_does_not_change_the_result(
    runs: IdiomRuns, idiom: Idiom, seed: int, counted: str
) -> None:
    """Odd seeds run with a replacement worker."""
    death = runs.draw_death(idiom, seed, counted)
    outcome = runs.with_death(idiom, death, is_replaced=seed % 2 == 1)
    check_death(runs, idiom, outcome, is_replaced=seed % 2 == 1)


# The first three count a step after its update, compare the count, and leave a loop without an end;
# the other two have passes that run.epochs does not count, and code after them.
ENDING = ("held_iterator", "mingpt_trainer", "nanogpt_train", "no_epochs", "one_pass")
IN_MAKE_TEST = ("no_epochs",)  # of the first kind, the generator has several


def proved_at_its_end(idiom: Idiom) -> list[pytest.MarkDecorator]:
    if idiom.name in IN_MAKE_TEST:
        return []
    return [pytest.mark.slow if idiom.name in ENDING else pytest.mark.soak]


@pytest.mark.parametrize(
    "idiom", [pytest.param(i, marks=proved_at_its_end(i)) for i in idioms()], ids=name_of
)
def test_a_death_in_the_last_step_does_not_change_the_result(runs: IdiomRuns, idiom: Idiom) -> None:
    for seed in range(2):
        outcome = runs.with_death(idiom, runs.draw_late_death(idiom, seed), is_replaced=seed == 1)
        check_death(runs, idiom, outcome, is_replaced=seed == 1)


def check_death(runs: IdiomRuns, idiom: Idiom, outcome: RunOutcome, *, is_replaced: bool) -> None:
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert outcome.died_at, "nobody has died"
    assert_same(idiom, outcome, runs.alone(idiom))
    if (
        is_replaced and not idiom.is_compared_alone
    ):  # the same number of workers draws the same numbers
        assert_as_undisturbed(idiom, outcome, runs.undisturbed(idiom))


@pytest.mark.parametrize("idiom", idioms(REFUSED), ids=name_of)
def test_idioms_with_wrong_results_are_rejected(runs: IdiomRuns, idiom: Idiom) -> None:
    assert idiom.refusal
    outcome = runs.refused(idiom)
    assert not outcome.survivors
    # The run ends with the first worker that fails.
    errors = [worker.error for worker in outcome.workers if worker.error]
    assert errors, outcome.describe()
    for error in errors:
        assert idiom.refusal in error, outcome.describe()
