"""An exception of an unmodified script reaches its agent."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import torch_elastic_harness
from elastic.launcher.torch_agent import WorkerFailure, first_failure

TIMEOUT_S = 240.0
CHILD = """
import torch_elastic_harness
torch_elastic_harness.on_import_of_torch()
raise ValueError("of the child")
"""
SCRIPT = f"""
import os, subprocess, sys
import torch
assert subprocess.run([sys.executable, "-c", {CHILD!r}]).returncode == 1
assert not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"])
raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""


@pytest.mark.slow
def test_importing_torch_installs_the_hook_despite_a_folder_named_elastic(tmp_path: Path) -> None:
    (entry,) = (
        e
        for e in importlib.metadata.entry_points(group="torch.backends")
        if e.name == "torch-elastic-harness"
    )
    assert entry.load() is torch_elastic_harness.on_import_of_torch
    for name in ("elastic", "checkpoints"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    error_file = tmp_path / "error.json"
    environment = {
        **os.environ,
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "ELASTIC_NODE_ID": "node-1",
    }
    done = subprocess.run(
        [sys.executable, tmp_path / "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError: of the child" in done.stderr
    said = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert done.stderr.strip().endswith(said)
    assert json.loads(error_file.read_text())["message"]["message"] == said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elastic", pytest.param("checkpoints", marks=pytest.mark.slow)])
def test_an_agent_names_the_module_that_hides_a_package(tmp_path: Path, name: str) -> None:
    """``python -m`` puts the working folder first."""
    hiding = tmp_path / f"{name}.py"
    hiding.touch()
    flags = ["--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=job", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    own = Path(torch_elastic_harness.__file__).with_name(name)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"elastic: {hiding} hides the package {name} of")
    assert f"({own})" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "variables", "is_ours"),
    [
        ("-m torch.distributed.run --rdzv_backend etcd-v3", {}, True),
        ("/bin/torchrun --rdzv-backend=etcd", {}, True),
        ("/bin/torchrun --rdzv-backend=etcd", {"ELASTIC_STOCK_ETCD": "1"}, False),
        ("/bin/torchrun train.py", {"PET_RDZV_BACKEND": "etcd-v3"}, True),
        ("/bin/torchrun --rdzv-backend=c10d train.py", {"PET_RDZV_BACKEND": "etcd-v3"}, False),
        ("train.py --rdzv-backend=etcd", {}, False),
    ],
)
def test_only_agents_with_a_backend_of_this_project_need_its_packages(
    words: str, variables: dict[str, str], is_ours: bool
) -> None:
    argv = ["python", *words.split()]
    assert torch_elastic_harness.is_agent(argv, variables) is is_ours


def test_a_worker_whose_script_has_imported_its_own_elastic_names_both(
    worker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (worker.parent / "elastic.py").touch()
    monkeypatch.syspath_prepend(worker.parent)
    monkeypatch.delitem(sys.modules, "elastic")
    torch_elastic_harness.on_import_of_torch()
    fail(AttributeError("module 'elastic' has no attribute 'join'"))
    assert f"{worker.parent / 'elastic.py'} hides the package elastic" in capsys.readouterr().err
    fail(AttributeError("module 'model' has no attribute 'join'"))
    assert not capsys.readouterr().err


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment of a worker; its error file."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("ELASTIC_NODE_ID", "node-1")
    monkeypatch.delenv("ELASTIC_ERROR_FILE_OWNER", raising=False)
    return tmp_path / "error.json"


def fail(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize("missing", ["TORCHELASTIC_ERROR_FILE", "ELASTIC_NODE_ID"])
def test_the_hook_is_not_installed_outside_our_workers(
    worker: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delenv(missing)
    before, environ = sys.excepthook, dict(os.environ)
    torch_elastic_harness.on_import_of_torch()
    assert sys.excepthook is before
    assert dict(os.environ) == environ


def test_an_error_file_written_by_a_decorated_script_is_kept(worker: Path) -> None:
    torch_elastic_harness.on_import_of_torch()
    worker.write_text("{}")
    fail(ValueError("later"))
    assert worker.read_text() == "{}"


def test_an_interrupt_is_not_a_failure_and_the_previous_hook_is_called(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *of: seen.append(of[1]))
    torch_elastic_harness.on_import_of_torch()
    interrupt, error = KeyboardInterrupt(), ValueError("boom")
    fail(interrupt)
    assert not worker.exists()
    fail(error)
    assert json.loads(worker.read_text())["message"]["message"] == "ValueError: boom"
    assert seen == [interrupt, error]


def ended(folder: Path, rank: int, text: str | None, time_s: int) -> ProcessFailure:
    file = folder / f"{rank}.json"
    file.unlink(missing_ok=True)
    if text is None:
        return ProcessFailure(rank, pid=1, exitcode=-9, error_file=str(file))
    message = {"message": text, "extraInfo": {"timestamp": str(time_s)}}
    file.write_text(json.dumps({"message": message}))
    return ProcessFailure(rank, pid=1, exitcode=1, error_file=str(file))


def test_the_root_cause_is_selected_among_the_failed_workers_of_a_node(tmp_path: Path) -> None:
    closed, own = "RuntimeError: Connection closed by peer [::1]:1", "ValueError: boom"

    def first(*texts: str | None) -> WorkerFailure | None:
        failures = {r: ended(tmp_path, r, text, 100 + r) for r, text in enumerate(texts)}
        return first_failure(RunResult(WorkerState.FAILED, failures=failures))

    assert first(closed, own, closed) == WorkerFailure(text=own, exit_code=1)
    assert first(closed, closed) == WorkerFailure(text=closed, exit_code=1)
    assert first(closed, None) == WorkerFailure(text=None, exit_code=-9)
    assert first_failure(RunResult(WorkerState.SUCCEEDED)) is None
