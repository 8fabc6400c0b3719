"""The variables that a check of the script reads."""

from __future__ import annotations

import sys
import weakref

import pytest

from elastic.train.checks import variables

of_the_module = object()


def names_seen_from_below() -> set[str]:
    return {name for found in variables(sys._getframe(1)) for name in found}


def test_global_variables_are_found() -> None:
    assert "of_the_module" in names_seen_from_below()


class Loss:
    """An object that can be referred to weakly."""


def test_local_variables_are_found_and_not_kept_alive() -> None:
    seen: list[bool] = []

    def script() -> set[str]:  # without assert, for which pytest adds a call of locals()
        average = Loss()
        alive = weakref.ref(average)
        names = names_seen_from_below()
        del average
        seen.append(alive() is None)
        return names

    assert "average" in script()
    assert seen == [True]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="locals() is a copy since then")
def test_the_dict_of_locals_is_not_changed() -> None:
    taken = locals()
    later = object()
    assert "later" not in names_seen_from_below()
    assert "later" not in taken
    del later
