"""Sharded state saved by some ranks and loaded by others, in real gloo process groups."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_script as script
import torch

import checkpoints
from checkpoints import loading
from checkpoints.storage import LocalStorage, page_cache_identity
from checkpoints.testing import FaultyStorage
from elastic.testing.forks.program import start_python

NAME = script.NAME
Result = dict[str, Any]
Run = Callable[..., list[Result]]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch and forks the ranks of every scenario."""
    process = start_python(
        [sys.executable, script.__file__],
        env=os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=180) == 0


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    return runner(server, tmp_path)


def runner(server: subprocess.Popen[str], folder: Path) -> Run:
    """Runs each scenario in a separate folder below ``folder``."""
    numbers = itertools.count()

    def one(scenario: str, size: int, root: Path, **arguments: object) -> list[Result]:
        scratch = folder / f"run{next(numbers)}"
        scratch.mkdir()
        order = {
            "scenario": scenario,
            "size": size,
            "folder": str(root),
            "scratch": str(scratch),
            "arguments": arguments,
        }
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        assert not any("traceback" in t for t in answer), next(
            t["traceback"] for t in answer if "traceback" in t
        )
        return [t.get("result", t) for t in answer]

    return one


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def save_all(root: Path, state: object, *, step: int, nonce: str = "aa") -> None:
    for rank in range(3):
        checkpoints.save(root, state, step=step, nonce=nonce, rank=rank, world_size=3)


def assert_loaded(results: list[Result]) -> None:
    for result in results:
        assert all(result["same"].values()), result
        assert result["in_place"] and result["step"] == 7


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (1, 2))]
)
def test_any_sharding_loads_into_any_other_sharding(run: Run, root: Path, turn: int) -> None:
    """Two ranks save; three ranks, a 2×2 mesh and one rank load, each with other placements."""
    run("save", 2, root, mesh=None, turn=turn)
    assert checkpoints.verify(root, NAME).world_size == 2
    assert_loaded(run("load", 3, root, mesh=None, turn=turn + 1, how="alone"))
    assert_loaded(run("load", 4, root, mesh=[2, 2], turn=turn + 2, how="together"))
    assert_loaded(run("load", 3, root, mesh=None, turn=turn + 2, how="memory"))
    state = checkpoints.load(root, NAME).state
    assert all(torch.equal(state["sharded"][name], script.values(name)) for name in script.SHAPES)
    assert state["tied"] is state["sharded"]["even"]


@pytest.mark.parametrize("turn", [0, 1])
def test_a_mesh_of_replicas_and_shards_writes_each_element_once(
    run: Run, root: Path, turn: int
) -> None:
    run("save", 4, root, mesh=[2, 2], turn=turn)
    state = checkpoints.load(root, NAME).state
    assert all(torch.equal(state["sharded"][name], script.values(name)) for name in script.SHAPES)
    assert_loaded(run("load", 3, root, mesh=None, turn=turn, how="together"))


def test_an_asynchronous_save_is_isolated_from_training(run: Run, root: Path) -> None:
    results = run("engine", 4, root)
    assert [result["status"] for result in results] == ["committed"] * 4, results
    state = checkpoints.load(root, NAME).state
    assert all(torch.equal(state["sharded"][name], script.values(name)) for name in script.SHAPES)


def test_training_continues_in_its_group_while_a_disk_hangs(run: Run, root: Path) -> None:
    """DCP's collectives deadlock here: examples/comparisons/background_collectives.py."""
    for result in run("background", 2, root):
        assert result["right"] and not result["early"]
        assert result["status"] == "committed"


@pytest.mark.parametrize(
    "mesh", [pytest.param(None, id="fsdp"), pytest.param([2, 2], id="hsdp", marks=pytest.mark.slow)]
)
def test_an_fsdp_model_and_its_optimizer_resume_at_another_world_size(
    run: Run, root: Path, mesh: list[int] | None
) -> None:
    run("fsdp_save", 4 if mesh else 2, root, mesh=mesh)
    for size, together in ((3, True), (1, False)):
        for result in run("fsdp_load", size, root, mesh=None, together=together):
            assert result["now"] == []
            assert result["next"] == []
    tensors = checkpoints.load(root, NAME).state["model"]
    assert tensors["head.weight"] is tensors["embedding.weight"]


def test_fsdp_over_tensor_parallelism(run: Run, root: Path) -> None:
    for result in run("tensor_parallel", 4, root):
        assert result["strided"]  # otherwise this tests nothing
        assert all(result["same"].values()), result


KINDS = {"ddp": 3, "fsdp": 3, "tp": 2, "tp_fsdp": 4}  # world sizes at which each is loaded


@pytest.fixture(scope="module")
def of_all_kinds(
    server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """A checkpoint of each kind, saved by four ranks."""
    folder = tmp_path_factory.mktemp("kinds")
    run = runner(server, folder)
    for kind in KINDS:
        for result in run("save_as", 4, folder, kind=kind):
            assert result["saved"] == [NAME], kind
    return folder, run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_all_parallelisms_load_into(
    of_all_kinds: tuple[Path, Run], kind: str
) -> None:
    """DDP, FSDP2, tensor parallelism in replicas, and both load from each other and continue
    training.
    """
    folder, run = of_all_kinds
    for result in run("load_as", KINDS[kind], folder, kind=kind, saved=list(KINDS)):
        assert result == {other: [] for other in KINDS}


def test_diverged_replicas_of_shards_are_not_committed(run: Run, root: Path) -> None:
    results = run("diverged", 4, root)
    assert not any(result["committed"] for result in results)
    notes = [note for result in results for note in result["notes"]]
    assert any("tensor 'up.weight' has different values in 00002-of-00004" in n for n in notes), (
        notes
    )


def test_unsupported_shards_are_rejected(run: Run, root: Path) -> None:
    for rank, answer in enumerate(run("refused", 2, root)):
        assert "no rank holds its values" in answer["partial"]
        assert "its placements imply" in answer["lying"]
        assert "world_size is 1" in answer["world"]
        assert "does not hold the region" in answer["rank"], rank
    assert not root.exists(), "the other rank would find files, or the record of a failure"


@pytest.fixture
def replicated(root: Path) -> Path:
    state = {name: script.values(name) for name in script.SHAPES}
    save_all(root, {**state, "large": torch.arange(200_000.0)}, step=1)
    return root


WAYS = pytest.mark.parametrize("way", ["exchange", "kernel", "memory"])
ONE_WAY = pytest.mark.parametrize(
    "way",
    ["exchange", *(pytest.param(way, marks=pytest.mark.slow) for way in ("kernel", "memory"))],
)


@pytest.mark.parametrize(
    ("alone", "packed"),
    [
        (1 << 20, 16 << 20),
        pytest.param(1 << 20, 1, marks=pytest.mark.slow),
        (100, 200),
        pytest.param(1, 1, marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_only_its_share_and_receives_the_rest(
    run: Run, replicated: Path, alone: int, packed: int
) -> None:
    size = checkpoints.verify(replicated, NAME).size_bytes
    results = run("exchanged", 3, replicated, alone=alone, packed=packed, way="exchange")
    for result in results:
        assert all(result["same"].values()), result
        assert result["read"] < size / 3 + 10_000
    assert sum(result["read"] for result in results) >= size * 0.99


@pytest.mark.parametrize("way", ["kernel", "memory"])
def test_ranks_with_a_shared_page_cache_read_parts_verified_by_peers(
    run: Run, replicated: Path, way: str
) -> None:
    for result in run("exchanged", 3, replicated, alone=1 << 20, packed=1 << 20, way=way):
        assert all(result["same"].values()), result


def test_page_cache_identity_detects_shared_files(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, two, link = (
        page_cache_identity(LocalStorage(tmp_path), name) for name in ("one", "two", "link")
    )
    assert one is not None and one == link and one != two
    assert page_cache_identity(LocalStorage(tmp_path), "none") is None
    assert page_cache_identity(FaultyStorage(LocalStorage(tmp_path)), "one") is None


@ONE_WAY
@pytest.mark.parametrize(
    ("trouble", "error", "text"),
    [
        ("disk", "ReadFailed", "injected"),
        ("model", "StateMismatch", "missing in the checkpoint: new"),
        ("name", "CheckpointNotFound", "there is no checkpoint"),
        ("memory", "LoadError", "MemoryError"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_ranks(
    run: Run, replicated: Path, trouble: str, error: str, text: str, way: str
) -> None:
    results = run("together_but", 3, replicated, trouble=trouble, way=way)
    for rank, result in enumerate(results):
        if rank != 1:
            assert result["error"] == error
            assert "on rank 1: " in result["text"]
        assert text in result["text"] or (rank == 1 and result["error"] == "MemoryError")
        assert not result["touched"]


def test_ranks_with_different_checkpoint_names_fail_to_load(run: Run, replicated: Path) -> None:
    save_all(replicated, {}, step=2)
    for result in run("together_but", 2, replicated, trouble="name", way="kernel"):
        assert result["error"] in ("LoadError", "StateMismatch") and not result["touched"]


@WAYS
def test_a_flipped_bit_is_reported_on_all_ranks(run: Run, replicated: Path, way: str) -> None:
    damaged = replicated / NAME / "00002-of-00003.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    for result in run("together_but", 2, replicated, trouble="none", way=way):
        assert (result["error"], result["touched"]) == ("CorruptCheckpoint", False)
        assert result["file"] == f"{NAME}/00002-of-00003.safetensors"


@pytest.mark.parametrize(
    "error",
    [
        checkpoints.CheckpointNotFound("none", hint="look"),
        checkpoints.UnsupportedFormat("new", hint="upgrade"),
        checkpoints.ReadFailed("disk", hint="look"),
        checkpoints.CorruptCheckpoint("a hash", file="a/b", tensor="w"),
        checkpoints.StateMismatch("a", missing=("x",), extra=("y",), mismatched=("z",)),
        checkpoints.TornRead("a"),
        checkpoints.LoadError("other", hint="look"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_remote_error_keeps_its_type_and_hint(error: checkpoints.LoadError) -> None:
    answer = loading.error_from_json(json.loads(json.dumps(loading.error_as_json(error))), 3)
    assert type(answer) is type(error)
    assert answer.message == f"on rank 3: {error.message}"
    assert answer.hint == error.hint


def test_a_file_that_changes_while_it_is_read_fails_all_ranks(run: Run, replicated: Path) -> None:
    for result in run("together_but", 3, replicated, trouble="changes", way="memory"):
        assert result["error"] == "TornRead"


@WAYS
def test_a_rank_that_dies_while_loading_does_not_hang_its_peers(
    run: Run, replicated: Path, way: str
) -> None:
    results = run("together_but", 3, replicated, trouble="dies", way=way)
    assert results[1] == {"dead": True}
    for result in (results[0], results[2]):
        assert (result["error"], result["touched"]) == ("LoadError", False)
        assert "the process group failed" in result["text"]


def test_a_world_reads_the_state_of_a_job_in_parts(run: Run, root: Path) -> None:
    """For each rank to read and verify all of it, shared storage would need W times as long."""
    results = run("restored", 3, root, trouble="none")
    size = checkpoints.verify(root, NAME).size_bytes
    for result in results:
        assert (result["error"], result["step"], result["weight"]) == ("", 2, [2.0, 2.0])
        assert result["read"] < size / 3 + 10_000
        assert result["unwatched"] == [], "or it would count as hung, however large its part is"


def test_a_world_waits_for_a_rank_that_reads_for_longer_than_a_collective_may_take(
    run: Run, root: Path
) -> None:
    """A large checkpoint, or a slow storage, could never be loaded otherwise."""
    for result in run("restored", 3, root, trouble="slow"):
        assert (result["error"], result["step"], result["weight"]) == ("", 2, [2.0, 2.0])
        assert result["skipped"] == []


def test_a_world_goes_back_past_damage_that_one_rank_has_read(run: Run, root: Path) -> None:
    results = run("restored", 3, root, trouble="damage")
    for result in results:
        assert (result["error"], result["step"], result["weight"]) == ("", 1, [1.0, 1.0])
    (reason,) = results[0]["skipped"]
    assert "do not match their checksum (found by rank " in reason


def test_a_rank_that_dies_in_a_restore_says_nothing_about_the_checkpoint(
    run: Run, root: Path
) -> None:
    """The others must continue in a new world with the newest checkpoint, not with an older one."""
    results = run("restored", 3, root, trouble="dies")
    assert results[1] == {"dead": True}
    for result in (results[0], results[2]):
        assert result["error"].startswith("WorldLost: a rank was lost"), result
        assert (result["step"], result["weight"]) == (0, [2.0, 2.0]), "changed before all was read"
        assert result["skipped"] == []
