"""``elastic checkpoints``, as a person or a script uses it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_states import flip, same, save_all, small_state

import checkpoints
import checkpoints.tools
from elastic.cli.checkpoints import FORMATS
from elastic.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save_all(tmp_path / "job", small_state(step), step=step, world_size=2, keep=None)
    return tmp_path / "job"


def as_json(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> Any:
    assert main(["checkpoints", *map(str, argv), "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def name_of(step: int) -> str:
    return f"step-{step:09d}.g0.aa"


def test_what_reads_no_tensors_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys, elastic.cli.main as m\n"
        "try: m.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)\n"
    )
    reads = (["ls", str(folder)], ["show", str(folder)])
    for argv in (["--help"], ["ls", "--help"], ["ls", "/there/is/none"], *reads):
        command = [sys.executable, "-c", code, "checkpoints", *argv]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False", argv
    assert FORMATS == checkpoints.tools.FORMATS


def test_ls_and_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [c["step"] for c in as_json(capsys, "ls", folder)] == [30, 20, 10]
    shown = as_json(capsys, "show", folder)
    assert shown["step"] == 30 and shown["world_size"] == 2
    assert {"name": "model/weight", "dtype": "F32", "shape": [7, 3]} in shown["tensors"]
    assert main(["checkpoints", "show", str(folder)]) == 0
    assert "written by 2 ranks\n" in capsys.readouterr().out, "not broken at the table's width"
    assert main(["checkpoints", "ls", str(folder)]) == 0
    assert "tensors" in capsys.readouterr().out


def test_names_are_not_broken_into_lines(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied, and searched for with grep."""
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["checkpoints", "ls", str(folder)]) == 0
    piped = capsys.readouterr().out
    assert all(name_of(step) in piped for step in (10, 20, 30))
    assert len(piped.splitlines()) == 7, "one line for each, three of the header, and the border"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert main(["checkpoints", "ls", str(folder)]) == 0
    assert name_of(30) in capsys.readouterr().out


def test_a_folder_without_checkpoints_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelled folder must not look like one whose checkpoints are all valid."""
    commands = ("ls", "show", "verify", "prune --keep 1 --yes", "diff a b", "export a b --to torch")
    for command, *flags in map(str.split, commands):
        assert main(["checkpoints", command, str(tmp_path / "jbo"), *flags]) == 2
        assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["checkpoints", "ls", str(tmp_path / "file")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "file").unlink()
    assert main(["checkpoints", "verify", str(tmp_path)]) == 65
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert main(["checkpoints", "ls", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert (shown.out, "there is no checkpoint in" in shown.err) == ("", True)
    assert as_json(capsys, "ls", tmp_path) == []


def test_verify_lists_damaged_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all(r["valid"] for r in as_json(capsys, "verify", folder))
    flip(folder / name_of(20) / "00001-of-00002.safetensors", -1)
    flip(folder / name_of(10) / "manifest.json", 100)
    results = as_json(capsys, "verify", folder, code=65)
    assert [r["valid"] for r in results] == [True, False, False]
    assert "00001-of-00002.safetensors" in results[1]["reason"]
    assert as_json(capsys, "verify", folder, name_of(30))[0]["valid"]


def test_diff_compares_tensor_by_tensor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "diff", folder, name_of(10), name_of(10)) == []
    state = small_state(10)
    state["model"]["weight"][0, 0] += 2
    state["model"]["bias"] = torch.zeros(3)
    del state["model"]["scale"]
    save_all(folder, state, step=40, keep=None)
    rows = as_json(capsys, "diff", folder, name_of(10), name_of(40))
    found = {row["tensor"]: row["difference"] for row in rows}
    assert found["model/weight"] == "1 of 21 elements differ, by at most 2"
    assert found["model/bias"] == "I64 [5] became F32 [3]"
    assert found["model/scale"] == "only in the old one"


def test_prune_requires_confirmation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "prune", str(folder), "--keep", "1"]) == 2
    assert "--yes" in capsys.readouterr().err
    chosen = as_json(capsys, "prune", folder, "--keep", 1, "--dry-run")["chosen"]
    assert chosen == [name_of(10), name_of(20)]
    assert len(checkpoints.list_checkpoints(folder)) == 3
    as_json(capsys, "prune", folder, "--keep", 1, "--every", 20, "--yes")
    assert [c.step for c in checkpoints.list_checkpoints(folder)] == [30, 20]
    assert main(["checkpoints", "prune", str(folder), "--keep", "2", "--yes"]) == 0
    assert capsys.readouterr().out == "there is nothing to remove\n"


@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
def test_export_and_import_round_trip(
    folder: Path, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "exported"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_json(capsys, "export", folder, name_of(20), target, "--to", form)
    trust = ["--trust"] if form == "dcp" else []
    info = as_json(capsys, "import", tmp_path / "new", target, "--from", form, "--step", 20, *trust)
    assert same(checkpoints.load(tmp_path / "new", info["name"]).state, small_state(20))


def test_usage_errors_are_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "show", str(folder), name_of(99)]) == 65
    assert "there is no checkpoint" in capsys.readouterr().err
    assert main(["checkpoints", "show", str(folder), "newest"]) == 65
    assert f"`elastic checkpoints ls {folder}`, lists them" in capsys.readouterr().err
    assert main(["checkpoints", "shwo", str(folder)]) == 2
    capsys.readouterr()
    missing = str(folder / "missing.pt")
    flags = ("--from", "torch", "--step", "1")
    assert main(["checkpoints", "import", str(folder), missing, *flags]) == 2
    assert "there is no file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_trust_is_refused_where_it_has_no_effect(
    folder: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(folder / name_of(10) / "00000-of-00002.safetensors")
    flags = ("--from", form, "--step", "1", "--trust")
    assert main(["checkpoints", "import", str(folder), source, *flags]) == 2
    assert f"(--trust) has no effect on the format {form}" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("on_terminal", [True, False])
@pytest.mark.parametrize("command", ["verify", "diff", "export", "import"])
def test_progress_is_shown_on_a_terminal_only(
    folder: Path,
    tmp_path: Path,
    command: str,
    on_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "file"
    checkpoints.export_to(folder, name_of(10), target, "safetensors")
    arguments: dict[str, list[object]] = {
        "verify": [folder],
        "diff": [folder, name_of(10), name_of(20)],
        "export": [folder, name_of(10), tmp_path / "out", "--to", "torch"],
        "import": [tmp_path / "new", target, "--from", "safetensors", "--step", 1],
    }
    err = Terminal() if on_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    as_json(capsys, command, *arguments[command])  # stdout is JSON and nothing else
    word = {"diff": "comparing"}.get(command, command[:5])
    assert (word in err.getvalue()) == on_terminal


@pytest.mark.parametrize("world_size", [1, 3])
def test_diff_is_independent_of_the_number_of_writers(
    folder: Path, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    save_all(folder, small_state(10), step=50, world_size=world_size, keep=None)
    assert as_json(capsys, "diff", folder, name_of(10), name_of(50)) == []
    assert main(["checkpoints", "diff", str(folder), name_of(10), name_of(50)]) == 0
    assert "no tensor differs" in capsys.readouterr().out


def test_diff_of_a_damaged_checkpoint_names_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / name_of(20) / "00001-of-00002.safetensors", -1)
    assert main(["checkpoints", "diff", str(folder), name_of(10), name_of(20)]) == 65
    assert "00001-of-00002.safetensors" in capsys.readouterr().err


def test_control_characters_in_names_of_tensors_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = []
    for step, value in ((1, 1.0), (2, 2.0)):
        state = {"weight\x1b]0;title\x07": torch.full((2,), value)}
        names.append(save_all(tmp_path, state, step=step, keep=None))
    assert main(["checkpoints", "show", str(tmp_path)]) == 0
    assert main(["checkpoints", "diff", str(tmp_path), *names]) in (0, 1)
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert "\\x1b]0;title" in output.out
