"""Gradients of sharded models over replicas equal those of an unsharded model on all samples.

On gloo, and on a backend that queues collectives on a stream, like NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import replica_gradients_program as program
from kit import nccl_semantics

from elastic.agent.identity import PortReserve
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode

SCRIPT = Path(program.__file__)
DEADLINE_S = 400  # it takes seconds; a shared machine may take a hundred times as long


@pytest.fixture
def ports() -> Iterator[tuple[int, ...]]:
    reserve = PortReserve()
    yield reserve.ports
    reserve.close()


@pytest.fixture(params=["gloo", pytest.param(nccl_semantics.NAME, marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def results(folder: Path, ports: tuple[int, ...], backend: str, *mesh: str) -> list[dict[str, Any]]:
    """The output of each of the four ranks; each dimension of the mesh has two ranks."""
    shared = ["--ports", *map(str, ports), "--folder", str(folder), "--mesh", *mesh]
    shared += ["--backend", backend]
    ranks = [
        LocalNode(
            f"rank {rank}",
            [sys.executable, str(SCRIPT), "--rank", str(rank), *shared],
            {**os.environ, "OMP_NUM_THREADS": "1"},
            f"{uuid.uuid4().hex}/{rank}",
            folder / f"{rank}.log",
            fork_server=shared_fork_server(),
        )
        for rank in range(program.SIZE)
    ]
    for rank in ranks:
        assert rank.wait(DEADLINE_S) == 0, rank.log_text()
    return [json.loads(rank.log_text().splitlines()[-1]) for rank in ranks]


def test_gradients_of_two_replicas_of_two_shards(
    tmp_path: Path, ports: tuple[int, ...], backend: str
) -> None:
    told = results(tmp_path, ports, backend, "shard")
    exact = (
        "plain",
        "activation checkpointing",
        "held whole",
        "not resharded",
        "two passes",
        "two passes, one reduction",
    )
    # Once, and on all ranks of the replica whose rank has set the flag.
    assert [one["asked"] for one in told] == [
        [[replica == 0, False], None, None] for replica in (0, 0, 1, 1)
    ]
    for one in told:
        assert {name: one[name] for name in exact if one[name] > 1e-12} == {}
        assert one["mixed precision"] < 1e-5
        assert one["refused"] == [
            "run.wrap() of a module with DTensors and without fully_shard",
            "run.wrap() of a sharded module",
        ]
        # No rank of the replica with the lost rank continues, and no rank waits for it.
        assert one["abort"]["raised"] in ("GroupAborted", "a peer is gone")
        assert one["abort"]["then"] < 1e-12
        assert not one["abort"]["is_open"]


def test_fsdp_over_tensor_parallelism(tmp_path: Path, ports: tuple[int, ...], backend: str) -> None:
    for one in results(tmp_path, ports, backend, "shard", "tp"):
        assert one["both"] < 1e-12


def test_gradients_of_tensor_parallelism_alone(
    tmp_path: Path, ports: tuple[int, ...], backend: str
) -> None:
    for one in results(tmp_path, ports, backend, "tp"):
        assert len(one) == 8
        assert {name: off for name, off in one.items() if not off < 1e-12} == {}
