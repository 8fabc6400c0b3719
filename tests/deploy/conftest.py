"""Every test that uses ``manifests`` runs on every overlay, alone and with components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import EVERYTHING, Rendered, rendered


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rendered]:
    """``render("prod+spot")``."""
    scratch: Path = tmp_path_factory.mktemp("overlays")
    return lambda name: rendered(name, scratch)


@pytest.fixture(params=EVERYTHING)
def manifests(request: pytest.FixtureRequest, render: Callable[[str], Rendered]) -> Rendered:
    return render(request.param)
