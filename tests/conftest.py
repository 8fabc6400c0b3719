"""Fixtures that several rooms of tests share, each in a file named by its concept."""

from __future__ import annotations

import pytest

pytest_plugins = ["etcd_fixtures"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: with two at a time, nobody waits for the last one at the end."""
    items.sort(key=lambda item: "kill" not in item.path.parts)
