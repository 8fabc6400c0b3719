"""This package's own processes do not import modules from the user's folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.child_interpreters import code_command, module_command
from elastic.testing.waiting import PATIENCE_S


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.mark.parametrize(
    "name",
    ["checkpoints", *(pytest.param(n, marks=pytest.mark.slow) for n in ("elastic", "queue"))],
)
def test_a_module_of_the_user_with_a_name_of_ours_is_not_imported(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the user')")
    code = "import checkpoints.errors, elastic.errors, queue; print(sys.argv[1:])"
    done = run(code_command(code, ["--flag"]), tmp_path)
    assert (done.stdout, done.returncode) == ("['--flag']\n", 0), done.stderr


def test_a_module_is_run_with_its_arguments(tmp_path: Path) -> None:
    done = run(module_command("elastic.cli.bound_to_parent", ["1", "true"]), tmp_path)
    assert done.returncode == 1, "its parent is not process 1"


def test_a_scripts_own_checkpoints_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints.py").write_text("")
    (tmp_path / "train.py").write_text("import elastic\nelastic.join()\n")
    done = run([sys.executable, "train.py"], tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-2]
    assert f"{tmp_path / 'checkpoints.py'} hides the package checkpoints" in last, done.stderr
