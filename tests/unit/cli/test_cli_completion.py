"""``elastic completion``: scripts that a shell accepts, with every command and flag."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.cli.completion import complete_parser
from elastic.cli.main import COMMANDS, main

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
_shtab_elastic
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script for bash."""
    path = tmp_path_factory.mktemp("completion") / "elastic.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as output:
        patch.setattr("sys.stdout", output)
        assert main(["completion", "bash"]) == 0
    return path


def completions(script: Path, *words: str) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(script), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_bash_completes_commands_flags_and_choices(script: Path) -> None:
    assert completions(script, "elastic", "") >= set(COMMANDS)
    assert completions(script, "elastic", "checkpoints", "ver") == {"verify"}
    assert "--nodes-local" in completions(script, "elastic", "run", "--no")
    assert completions(script, "elastic", "demo", "-o", "") == {"table", "json"}
    assert completions(script, "elastic", "completion", "") >= {"bash", "zsh"}


def test_zsh_gets_its_own_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef elastic")
    assert "--nodes-local" in text and "verify" in text
    if zsh := shutil.which("zsh"):
        path = tmp_path / "_elastic"
        path.write_text(text)
        subprocess.run([zsh, "-n", str(path)], check=True, timeout=60)


def test_an_unsupported_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "'fish'" in capsys.readouterr().err


def test_without_shtab_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "torch-elastic-harness[completion]" in capsys.readouterr().err


def test_every_command_with_a_table_prints_json_as_well() -> None:
    commands: dict[str, argparse.ArgumentParser] = {}
    for action in complete_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands = dict(action.choices)
    demo = commands["demo"].parse_args(["-o", "json"])
    listed = commands["checkpoints"].parse_args(["ls", "folder", "-o", "json"])
    variables = commands["env"].parse_args(["-o", "json"])
    assert (demo.output, listed.output, variables.output) == ("json", "json", "json")
