"""Skips all tests here without a GPU; small worlds for the tests that need one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.testing.small_world.world import SmallWorld

sys.path.append(str(Path(__file__).parents[1] / "idioms"))  # its scripts run here, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is false here"))


@pytest.fixture(scope="session")
def world() -> Iterator[SmallWorld]:
    """Its host uses no GPU; the workers that it forks do."""
    with SmallWorld() as made:
        yield made
