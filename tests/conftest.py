"""Fixtures that several rooms of tests share, each in a file named by its concept."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import HealthCheck, settings

# Time says nothing about an example on a machine that other tests use, too.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

pytest_plugins = ["etcd_fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests of each, in a random order"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, so that with two at a time nobody waits long for the last one: those that
    kill, then those of workers, processes and command lines, which the alphabet has at its end."""
    seed = config.getoption("--shuffle")
    if seed is not None:
        # Not random.shuffle: a test keeps its place whichever others are selected.
        items.sort(key=lambda item: _digest(f"{seed} {item.nodeid}"))
        items.sort(key=lambda item: _digest(f"{seed} {item.path}"))  # a file's fixtures stay up
        return
    items.sort(key=lambda item: str(item.path), reverse=True)
    items.sort(key=lambda item: "kill" not in item.path.parts)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
