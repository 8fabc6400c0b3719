"""Fixtures for both ends of a link: an agent and worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from link_kit import Agent, Processes


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()
