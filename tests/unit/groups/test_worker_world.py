"""The world that a worker reads from its environment, and errors in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.errors import ConfigError
from elastic.groups.world import largest_world, world_from_environment
from elastic.testing.forks.server import run_forked
from elastic.testing.waiting import PATIENCE_S

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "1"}
OURS = {"ELASTIC_WORLD": '{"generation":7,"nonce":"3f9c","lineage":[1,2,5]}'}
OURS |= {"ELASTIC_NODE_NAME": "node-b", "ELASTIC_MAX_NODES": "3"}


def test_plain_python_is_a_world_of_one() -> None:
    world = world_from_environment({})
    assert (world.rank, world.size, world.generation, world.node) == (0, 1, 1, "local")
    assert len(world.nonce) == 8
    assert world.nonce != world_from_environment({}).nonce


def test_under_a_stock_backend_the_restart_count_is_the_generation() -> None:
    world = world_from_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (world.rank, world.size, world.local_rank, world.generation) == (3, 4, 1, 3)
    assert world.nonce == ""  # to be agreed by the group
    assert world.node == "node-1"


def test_under_our_backend_the_agent_provides_the_world() -> None:
    world = world_from_environment({**TORCHRUN, **OURS, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (world.generation, world.nonce, world.lineage) == (7, "3f9c", (1, 2, 5))
    assert world.node == "node-b"


def test_an_incomplete_environment_is_rejected() -> None:
    with pytest.raises(ConfigError, match="RANK=0 but lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        world_from_environment({"RANK": "0"})


def test_an_invalid_number_is_rejected_with_its_variable() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE='soon'"):
        world_from_environment({**TORCHRUN, "WORLD_SIZE": "soon"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", "is a JSON int"),
        ('{"generation":7}', "missing 'nonce'"),
        ('{"generation":"7","nonce":"","lineage":[]}', "generation='7', expected int"),
        ('{"generation":7,"generation":8,"nonce":"","lineage":[]}', "duplicate field"),
    ],
)
def test_an_invalid_elastic_world_variable_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"ELASTIC_WORLD=.* {message}"):
        world_from_environment({**TORCHRUN, "ELASTIC_WORLD": text})


def test_the_largest_world_bounds_the_default_batch() -> None:
    assert largest_world({}) == 1
    assert largest_world(TORCHRUN) == 4
    assert largest_world({**TORCHRUN, **OURS}) == 6


def test_importing_elastic_imports_no_torch() -> None:
    code = "import sys, elastic; elastic.ConfigError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_exported_name_exists() -> None:
    import elastic

    assert all(getattr(elastic, name) is not None for name in elastic.__all__)
    assert set(elastic.__all__) <= set(dir(elastic))
    with pytest.raises(AttributeError, match="no attribute 'joyn'"):
        _ = elastic.joyn


@pytest.mark.parametrize(("error", "code"), [("CheckpointRequired", 65), ("TrainingError", 1)])
def test_an_exception_reaches_the_agent_and_sets_the_exit_code(
    tmp_path: Path, error: str, code: int
) -> None:
    file = tmp_path / "error.json"
    script = (
        "from elastic.errors import *\n"
        "from elastic.groups.faults import FailureHook\n"
        "FailureHook().install()\n"
        f"raise {error}('it went wrong', hint='do this')\n"
    )
    done = run_forked(
        [sys.executable, "-c", script],
        timeout_s=PATIENCE_S,
        env={"TORCHELASTIC_ERROR_FILE": str(file), "PATH": ""},
    )
    assert done.returncode == code
    assert f"{error}: it went wrong" in done.stderr
    message = json.loads(file.read_text())["message"]
    assert message["message"].startswith(f"{error}: it went wrong")
    assert "it went wrong" in message["extraInfo"]["py_callstack"]


LOST_PEERS = """
from elastic.groups.faults import FailureHook
from elastic.telemetry.journal import Journal
import os
journal = Journal(folder=os.environ.get("ELASTIC_JOURNAL"), identity={"node": "a"}, role="worker")
FailureHook(journal, lambda: {"generation": 3, "step": 41}).install()
def train():
    raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
train()
"""


@pytest.mark.parametrize("journal", [True, False])
def test_lost_peers_are_logged_in_one_line_with_a_journal_traceback(
    tmp_path: Path, journal: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOST_PEERS)
    done = run_forked(
        [sys.executable, str(script)],
        timeout_s=PATIENCE_S,
        env={
            "PATH": "",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "ELASTIC_NODE_ID": "0",
            **({"ELASTIC_JOURNAL": str(tmp_path / "journal")} if journal else {}),
        },
    )
    assert done.returncode == 1
    if not journal:
        message, place = done.stderr.splitlines()
        assert message.startswith(
            "elastic: peers, or the connections to them, are lost: RuntimeError: "
        )
        assert place.startswith(f"  raised at {script}:8 in train; ELASTIC_JOURNAL=FOLDER")
        return
    assert done.stderr == ""
    (file,) = (tmp_path / "journal").iterdir()
    fault = next(e for e in map(json.loads, file.read_text().splitlines()) if "traceback" in e)
    assert [fault[key] for key in ("event", "generation", "step")] == ["world-fault", 3, 41]
    assert fault["traceback"].startswith("Traceback (most recent call last):")
    assert 'train.py", line 8, in train' in fault["traceback"]


def test_an_existing_error_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic.groups.faults import record

    file = tmp_path / "error.json"
    file.write_text("{}")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record(ValueError("late"))
    assert file.read_text() == "{}"
