"""The examples in docstrings are correct: users copy them."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import checkpoints
import elastic.membership
import elastic.store
import elastic.tuning

PACKAGES = (
    checkpoints,
    elastic.membership,
    elastic.store,
    elastic.tuning,
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_examples_give_the_results_that_they_show(package: ModuleType) -> None:
    names = [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    results = [doctest.testmod(importlib.import_module(n)) for n in [package.__name__, *names]]
    assert sum(result.attempted for result in results) > 0
    assert not any(result.failed for result in results)
