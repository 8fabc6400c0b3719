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

from elastic.node.ports import PortReserve
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode
from elastic.testing.slowness import is_within

SCRIPT = Path(script.__file__)
DEADLINE_S = 400  # a scenario takes seconds; a machine that is shared may take a hundred times that
# On an idle machine. It takes milliseconds; after 10 s the process is ended.
RELEASED_WITHIN_S = 3.0
pytestmark = pytest.mark.cluster

Result = dict[str, Any]


@pytest.fixture
def ports() -> Iterator[tuple[int, ...]]:
    """Held as an agent holds them: bound, not listening, for longer than any group lives."""
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
        """What each rank told; all but the one that is to die must end well."""
        codes = [node.wait(DEADLINE_S) for node in self._nodes]
        told = []
        for rank, (node, code) in enumerate(zip(self._nodes, codes, strict=True)):
            text = node.log_text()
            if rank == killed:
                assert code == -signal.SIGKILL, text
            else:
                assert code == 0, f"rank {rank}:\n{text}"
                told.append(json.loads(next(x for x in text.splitlines() if x.startswith("{"))))
        return told

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


@pytest.mark.parametrize("cycles", [60, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("scenario", ["orderly", "aborted"])
def test_rebuilds_leave_nothing_behind(
    scenario: str, cycles: int, tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for told in run(scenario, 2, tmp_path, ports, CYCLES=cycles):
        early, late = told["early"], told["late"]
        print(scenario, cycles, early, late, told["ms"])
        assert late["fds"] == early["fds"]
        assert late["threads"] <= early["threads"]
        assert late["rss_mib"] < early["rss_mib"] + 8
        assert told["hook"] == "excepthook"  # not one of torch's around another for each group


def test_a_rank_that_waits_for_a_survivor_is_released(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for told in run("half_broken_ring", 3, tmp_path, ports, killed=1):
        assert told["fault"], told
        assert "gloo/transport/" in told["error"]  # by which a fault is told
        assert told["total"] == 2.0


def test_a_scripts_own_collectives_end_with_the_group(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for told in run("own_collectives", 3, tmp_path, ports, CYCLES=60):
        assert is_within(told["longest_s"], 5.0)


@pytest.mark.parametrize("unused", [0, 1])
def test_a_backward_pass_ends_with_the_group(
    unused: int, tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for told in run("own_backward", 3, tmp_path, ports, CYCLES=30, UNUSED=unused):
        print(told)
        assert is_within(told["longest_s"], 5.0)  # gloo would go on for half an hour


def test_gradients_are_those_of_one_process(tmp_path: Path, ports: tuple[int, ...]) -> None:
    for told in run("gradients", 2, tmp_path, ports):
        assert all(worst < 1e-12 for worst in told["worst"].values()), told["worst"]


def test_a_state_arrives_as_it_was_or_not_at_all(tmp_path: Path, ports: tuple[int, ...]) -> None:
    bystander, source, receiver = run("moved_state", 3, tmp_path, ports)
    assert set(receiver["got"].values()) == {True}
    assert not any([*bystander["got"].values(), *source["got"].values()])
    assert "was corrupted in transfer" in receiver["damaged"] and "rank 1" in receiver["damaged"]
    assert bystander["damaged"] == source["damaged"] == "None"


def test_an_abort_leaves_the_users_sockets_alone(tmp_path: Path, ports: tuple[int, ...]) -> None:
    for told in run("users_sockets", 2, tmp_path, ports):
        assert told["total"] == 2.0
        assert told["sockets"] >= 3  # the store's, gloo's two
        assert told["mine"] == []
        assert told["heard"] == "still here"
        assert told["inherited"] == ["/dev/null"]
        assert not told["initialized"]


def test_a_build_without_all_ranks_ends_and_the_next_one_works(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    waiting = run("missing_rank", 3, tmp_path, ports)
    assert [told["total"] for told in waiting] == [3.0, 3.0, 3.0]
    for told in waiting[:2]:
        assert told["timeout"] == "GroupBuildFailed"
        assert told["announced"] == told["aborted"] == "Superseded"
    assert waiting[0]["missing"] == [2]


@pytest.mark.parametrize(("victim", "error"), [(0, "GroupBuildFailed"), (1, "Superseded")])
def test_a_rank_that_dies_in_the_build_does_not_keep_the_others(
    victim: int, error: str, tmp_path: Path, ports: tuple[int, ...]
) -> None:
    for told in run("dies_in_build", 3, tmp_path, ports, killed=victim, VICTIM=victim):
        assert told["error"] == error
        assert told["fault"]
        assert "not been initialized" in told["group"]
        assert told["total"] == 2.0


def test_a_rank_that_dies_before_it_connects_does_not_keep_the_others(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    """They wait without a socket that could be shut down."""
    results = run("dies_before_connecting", 3, tmp_path, ports)
    alive = [told for told in results if not told["died"]]
    assert len(alive) == 2
    for told in alive:
        assert told["error"] == "Superseded"
        assert told["total"] == 2.0
        assert is_within(told["took_s"], RELEASED_WITHIN_S)


def test_a_store_that_never_answers_does_not_keep_a_rank(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    (told,) = run("mute_host", 1, tmp_path, ports)
    assert told["errors"] == ["GroupBuildFailed", "Superseded", "GroupBuildFailed"]
    assert told["more_fds"] == 0


def test_a_world_of_one_needs_no_peers(tmp_path: Path, ports: tuple[int, ...]) -> None:
    (told,) = run("alone", 1, tmp_path, ports)
    assert told == {
        "totals": [1.0, 1.0],
        "timeouts_s": [1800.0, 77.0, "ConfigError"],
        "superseded": True,
    }
