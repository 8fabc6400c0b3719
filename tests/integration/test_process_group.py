"""Process groups that are built, aborted, destroyed and built again, in real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_group_script as script
import pytest

from elastic.agent.identity import PortReserve
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode
from elastic.testing.slowness import is_within

SCRIPT = Path(script.__file__)
DEADLINE_S = 400  # a scenario takes seconds; a shared machine may take a hundred times as long
# On an idle machine: it takes milliseconds, and after 10 s the process is ended.
RELEASED_WITHIN_S = 3.0

Result = dict[str, Any]


@pytest.fixture
def ports() -> Iterator[tuple[int, ...]]:
    """Reserved as by an agent: bound but not listening, for longer than any group exists."""
    reserve = PortReserve()
    yield reserve.ports
    reserve.close()


class Ranks:
    """The processes of one scenario."""

    def __init__(
        self, scenario: str, size: int, folder: Path, ports: tuple[int, ...], **env: object
    ) -> None:
        shared = ["--size", size, "--ports", *ports, "--folder", folder]
        environment = {"OMP_NUM_THREADS": "1", **{k: str(v) for k, v in env.items()}}
        self._nodes = [
            LocalNode(
                f"rank {rank}",
                [sys.executable, str(SCRIPT), scenario, "--rank", str(rank), *map(str, shared)],
                {**os.environ, **environment},
                f"{uuid.uuid4().hex}/{rank}",
                folder / f"{uuid.uuid4().hex}.log",
                fork_server=shared_fork_server(),
            )
            for rank in range(size)
        ]

    def results(self, *, killed: int | None = None) -> list[Result]:
        """The result of each rank; all ranks except the one that dies must exit with 0."""
        codes = [node.wait(DEADLINE_S) for node in self._nodes]
        result = []
        for rank, (node, code) in enumerate(zip(self._nodes, codes, strict=True)):
            text = node.log_text()
            if rank == killed:
                assert code == -signal.SIGKILL, text
            else:
                assert code == 0, f"rank {rank}:\n{text}"
                result.append(json.loads(next(x for x in text.splitlines() if x.startswith("{"))))
        return result

    def end(self) -> None:
        for node in self._nodes:
            node.kill()


def run(
    scenario: str,
    size: int,
    folder: Path,
    ports: tuple[int, ...],
    *,
    killed: int | None = None,
    **env: object,
) -> list[Result]:
    ranks = Ranks(scenario, size, folder, ports, **env)
    try:
        return ranks.results(killed=killed)
    finally:
        ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize("cycles", [60, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("scenario", ["orderly", "aborted"])
def test_rebuilds_leak_no_resources(
    scenario: str, cycles: int, tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for result in run(scenario, 2, tmp_path, ports, CYCLES=cycles):
        early, late = result["early"], result["late"]
        print(scenario, cycles, early, late, result["ms"])
        assert late["fds"] == early["fds"]
        assert late["threads"] <= early["threads"]
        assert late["rss_mib"] < early["rss_mib"] + 8
        assert result["hook"] == "excepthook"  # no nesting of torch's wrappers per group


def test_an_abort_releases_a_rank_that_waits_for_a_survivor(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for result in run("half_broken_ring", 3, tmp_path, ports, killed=1):
        assert result["fault"], result
        assert "gloo/transport/" in result["error"]  # by which a fault is reported
        assert result["total"] == 2.0


def test_an_abort_releases_peers_in_the_group_of_a_launcher(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    """Without run.retry: the failed process takes seconds to end."""
    for result in run("group_of_a_launcher", 3, tmp_path, ports):
        assert result == {"total": 3.0, "fault": True}


def test_an_abort_ends_the_collectives_of_a_script(tmp_path: Path, ports: tuple[int, ...]) -> None:
    for result in run("own_collectives", 3, tmp_path, ports, CYCLES=60):
        assert is_within(result["longest_s"], 5.0)


@pytest.mark.parametrize("unused", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_abort_ends_a_backward_pass(unused: int, tmp_path: Path, ports: tuple[int, ...]) -> None:
    for result in run("own_backward", 3, tmp_path, ports, CYCLES=30, UNUSED=unused):
        print(result)
        assert is_within(result["longest_s"], 5.0)  # gloo would continue for half an hour


def test_gradients_equal_those_of_one_process(tmp_path: Path, ports: tuple[int, ...]) -> None:
    for result in run("gradients", 2, tmp_path, ports):
        assert all(worst < 1e-12 for worst in result["worst"].values()), result["worst"]


def test_a_state_arrives_bit_identical_or_not_at_all(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    bystander, source, receiver = run("moved_state", 3, tmp_path, ports)
    assert set(receiver["got"].values()) == {True}
    assert not any([*bystander["got"].values(), *source["got"].values()])
    assert "was corrupted in transfer" in receiver["damaged"] and "rank 1" in receiver["damaged"]
    assert bystander["damaged"] == source["damaged"] == "None"


def test_an_abort_does_not_close_sockets_of_the_user(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for result in run("users_sockets", 2, tmp_path, ports):
        assert result["total"] == 2.0
        assert result["sockets"] >= 3  # the store's, gloo's two
        assert result["mine"] == []
        assert result["heard"] == "still here"
        assert result["inherited"] == ["/dev/null"]
        assert not result["initialized"]


def test_a_build_with_a_missing_rank_fails_and_the_next_one_succeeds(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    waiting = run("missing_rank", 3, tmp_path, ports)
    assert [result["total"] for result in waiting] == [3.0, 3.0, 3.0]
    for result in waiting[:2]:
        assert result["timeout"] == "GroupBuildFailed"
        assert result["announced"] == result["aborted"] == "Superseded"
    assert waiting[0]["missing"] == [2]


@pytest.mark.parametrize(("victim", "error"), [(0, "GroupBuildFailed"), (1, "Superseded")])
def test_a_rank_that_dies_during_the_build_does_not_block_its_peers(
    victim: int, error: str, tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for result in run("dies_in_build", 3, tmp_path, ports, killed=victim, VICTIM=victim):
        assert result["error"] == error
        assert result["fault"]
        assert "not been initialized" in result["group"]
        assert result["total"] == 2.0


def test_a_rank_that_dies_before_it_connects_does_not_block_its_peers(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    """They wait without a socket that could be shut down."""
    for attempt in range(20):  # the kernel chooses the victim, and one in three is no use
        folder = tmp_path / str(attempt)
        folder.mkdir()
        results = run("dies_before_connecting", 3, folder, ports)
        if alive := [result for result in results if not result["died"]]:
            break
    assert len(alive) == 2
    for result in alive:
        assert result["error"] == "Superseded"
        assert result["total"] == 2.0
        assert is_within(result["took_s"], RELEASED_WITHIN_S)


def test_an_unresponsive_store_does_not_block_a_rank(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    (result,) = run("mute_host", 1, tmp_path, ports)
    assert result["errors"] == ["GroupBuildFailed", "Superseded", "GroupBuildFailed"]
    assert result["more_fds"] == 0


def test_a_world_of_one_needs_no_peers(tmp_path: Path, ports: tuple[int, ...]) -> None:
    (result,) = run("alone", 1, tmp_path, ports)
    assert result == {
        "totals": [1.0, 1.0],
        "timeouts_s": [1800.0, 77.0, "ConfigError"],
        "superseded": True,
    }
