"""``elastic``: subcommands, usage errors, help and version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from elastic.cli.main import COMMANDS, main
from elastic.testing.slowness import is_within


def test_help_lists_every_command_without_importing_torch() -> None:
    code = (
        "import sys, elastic.cli.main as m\n"
        "try: m.main(['-h'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
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


def test_help_takes_less_than_0_3_s() -> None:
    """The minimum of several CPU times, which other processes can only increase."""
    code = (
        "import time, elastic.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: print(time.process_time())\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(4)
    ]
    assert is_within(min(float(run.stdout.splitlines()[-1]) for run in runs), 0.3)


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
