"""One small world for all generated scripts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scenarios import Runner

from elastic.testing.small_world.world import SmallWorld


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with SmallWorld() as world:
        yield Runner(world, tmp_path_factory.mktemp("generated"), limit_s=120.0)
