"""Every test that uses ``manifests`` runs on every overlay, alone and with components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import EVERYTHING, OVERLAYS, RESTORE, Rendered, rendered

# Each overlay, and each component once. The others only in `make test-all`, and in the tests of
# schemas.
IN_SHORT = {
    *OVERLAYS,
    "jobset+spot+rdma+volcano",
    "trainer+kueue",
    "prod+object-store",
    "prod+node-tls+own-certificates",
    "job+monitoring+etcd-monitoring",
    "kube render prod",
    "kube render job+rdma+kueue",
    RESTORE,
}


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rendered]:
    """``render("prod+spot")``."""
    scratch: Path = tmp_path_factory.mktemp("overlays")
    return lambda name: rendered(name, scratch)


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in IN_SHORT else [pytest.mark.slow])
        for name in EVERYTHING
    ]
)
def manifests(request: pytest.FixtureRequest, render: Callable[[str], Rendered]) -> Rendered:
    return render(request.param)
