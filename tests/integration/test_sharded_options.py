"""Modifications of sharded models work as on an unsharded one, or are rejected with the reason."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_options_program as program
from replica_gradients_program import SIZE
from torch.distributed.fsdp import FSDPModule

from elastic.agent.identity import PortReserve
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode

SCRIPT = Path(program.__file__)
DEADLINE_S = 540  # it takes seconds; a shared machine may take a hundred times as long
pytestmark = pytest.mark.slow
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Results]]:
    """The output of each of the four ranks, for all options."""
    folder, reserve = tmp_path_factory.mktemp("options"), PortReserve()
    arguments = ["--ports", *map(str, reserve.ports), "--folder", str(folder)]
    ranks = LocalNode(
        "ranks",
        [sys.executable, str(SCRIPT), *arguments],
        # Avoids a process per thread of torch.compile's own compiler.
        {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        uuid.uuid4().hex,
        folder / "log",
        fork_server=shared_fork_server(),
    )
    try:
        code = ranks.wait(DEADLINE_S)
        logs = [(folder / f"{rank}.log").read_text() for rank in range(SIZE)]
        assert code == 0, "\n".join([ranks.log_text(), *logs])
    finally:
        ranks.kill()
    yield [json.loads(text.splitlines()[-1]) for text in logs]
    reserve.close()


@pytest.mark.parametrize("way", ["wrap", "build"])
@pytest.mark.parametrize("option", program.OPTIONS)
def test_an_option_trains_like_the_unsharded_model_or_is_rejected(
    results: list[Results], way: str, option: str
) -> None:
    expected = program.OPTIONS[option]
    if option == "tied, in two groups" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("before torch 2.13, two groups keep no trace of a tied weight")
    for one in results:
        found = one[way][option]
        if expected.refused:
            assert str(found).startswith(f"run.{way}() {expected.refused}"), found
        else:
            assert isinstance(found, float), found
            assert found <= expected.tolerance


def test_later_settings_that_would_change_the_mean_are_rejected(results: list[Results]) -> None:
    for one in results:
        for way, names in program.REFUSED_LATER.items():
            assert one[way]["later"] == [f"model.{n}" for n in names for _ in "ab"]


def test_gradients_accumulated_over_steps_with_other_shares_are_weighted_by_each(
    results: list[Results],
) -> None:
    for one in results:
        assert one["build"]["over several steps"] <= program.OPTIONS["plain"].tolerance
