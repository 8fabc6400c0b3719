"""``elastic``: subcommands, usage errors, help, version, and completion in a shell."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from kit.cpu_time import least_cpu_s

from elastic.cli.completion import complete_parser
from elastic.cli.main import COMMANDS, main
from elastic.testing.slowness import is_within


def test_help_of_all_commands_and_those_that_only_print_do_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import importlib, sys, elastic.cli.main as m\n"
        "try: m.main(['-h'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'rich' not in sys.modules\n"
        "for command in m.COMMANDS.values():\n"
        "    importlib.import_module(command.module).parser()\n"
        f"for argv in ['events', {str(tmp_path)!r}], ['env'], ['list']: assert m.main(argv) == 0\n"
        "assert not {'torch', 'numpy', 'grpc'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"elastic {version('torch-elastic-harness')}"


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rnu"]) == 2
    captured = capsys.readouterr()
    assert "'rnu'" in captured.err and "'run'" in captured.err
    assert captured.out == ""


def test_a_missing_command_is_a_usage_error_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["--help", "list", "status"])
def test_commands_that_print_take_less_than_0_3_s(command: str) -> None:
    code = (
        "import sys, time, elastic.cli.main as m\n"
        "try: m.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(time.process_time())\n"
    )
    took_s, _ = least_cpu_s(code, command, enough_s=0.3)
    assert is_within(took_s, 0.3)


def test_a_closed_output_pipe_causes_no_traceback() -> None:
    """``elastic env -o json | head``: the pipe is closed before the first byte is written."""
    command = [sys.executable, "-m", "elastic.cli.main", "env", "-o", "json"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_unknown_flag_of_a_subcommand_is_reported_by_that_subcommand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its parent's -h does not list the flags."""
    assert main(["kube", "render", "--gpu-per-node=8", "train.py"]) == 2
    shown = capsys.readouterr().err
    assert "unknown flag --gpu-per-node, did you mean '--gpus-per-node'?" in shown
    assert "`elastic kube render -h`" in shown


# Completion -------------------------------------------------------------------------------------

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
