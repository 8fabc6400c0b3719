"""torchrun's parser read from torch's source: equal to the one that torch itself creates."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.cli import run
from elastic.cli.run import imported_parser, torchrun_parser

COMMANDS = """
import json, sys
from elastic.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.stdout.flush()
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    print(code, "torch" in sys.modules, flush=True)
"""


def described(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Every argument with all of its attributes; classes and functions by their names."""
    return [
        {
            "kind": type(action).__name__,
            **{k: getattr(v, "__qualname__", v) for k, v in vars(action).items()},
            "container": None,
        }
        for action in parser._actions
    ]


def test_the_parser_equals_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2:7")
    expected = described(imported_parser())
    monkeypatch.delitem(sys.modules, "torch.distributed.run")  # as in a fresh process
    parser = torchrun_parser()
    assert "torch.distributed.run" not in sys.modules, "torch was imported after all"
    assert described(parser) == expected
    assert parser.parse_args(["--nnodes=3", "x.py", "--nnodes=4"]).nnodes == "3"


def test_help_and_usage_errors_do_not_import_torch(tmp_path: Path) -> None:
    cases = (
        (("run", "--help"), 0, "--nproc-per-node"),
        (("run", "--nnodez=3", "x.py"), 2, "unknown flag --nnodez"),
        (("run", "--embedded-etcd", "--nodes-local=2", "no.py"), 2, "does not exist"),
        (("demo", "--help"), 0, "--output"),
    )
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([words for words, _, _ in cases])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # in order
        text=True,
        timeout=300,
        check=True,
        cwd=tmp_path,
    )
    rest = done.stdout
    for words, code, text in cases:
        shown, end, rest = rest.partition(f"\n{code} False\n")
        assert end and text in shown, (words, done.stdout)


SOURCE = """
{imports}
def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--heavy", choices={choices})
    return parser
"""


@pytest.mark.parametrize(
    ("imports", "choices"),
    [
        ("import argparse\nimport torch", "torch.strange()"),
        ("import argparse\nfrom torch import strange", "strange()"),
        ("import argparse\nfrom .strange import odd", "odd()"),
        ("import argparse\nfrom torch.strange import odd", "odd()"),
        ("import argparse\nclass", "1"),
        ("import argparse", "undefined()"),
    ],
)
def test_a_parser_that_needs_other_modules_is_imported(
    imports: str, choices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    (folder / "run.py").write_text(SOURCE.format(imports=imports, choices=choices))
    monkeypatch.delitem(sys.modules, "torch.distributed.run", raising=False)
    monkeypatch.setattr(run._Sources, "_file", lambda self, name: folder / "run.py")
    given = argparse.ArgumentParser()
    monkeypatch.setattr(run, "imported_parser", lambda: given)
    assert torchrun_parser() is given
