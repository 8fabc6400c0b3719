"""One small world for all idioms, and the runs that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from idiom_runs import IdiomRuns

from elastic.testing.small_world.world import SmallWorld


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdiomRuns]:
    with SmallWorld() as world:
        yield IdiomRuns(world, tmp_path_factory.mktemp("idioms"))
