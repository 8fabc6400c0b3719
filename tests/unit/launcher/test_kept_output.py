"""What workers write reaches the agent's own streams, and is kept for ``elastic logs``."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import LogsDest

from elastic.launcher import output
from elastic.launcher.output import KeptOutput
from elastic.telemetry.journal import Journal
from elastic.telemetry.log import get_logger
from elastic.telemetry.reader import read_folder

WORLD = (7, 4)  # generation, and the first rank of this node


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def kept(folder: Path) -> Iterator[KeptOutput]:
    kept = KeptOutput(
        Journal(folder=folder, identity={"node": "a"}, role="output", run_id="x"), lambda: WORLD
    )
    yield kept
    kept.close()


def inherited(workers: int = 1) -> LogsDest:
    """torchrun's destinations without --redirects and --tee."""
    ranks = range(workers)
    return LogsDest(stdouts=dict.fromkeys(ranks, ""), stderrs=dict.fromkeys(ranks, ""))


def run_worker(destinations: LogsDest, program: str, local_rank: int = 0) -> None:
    """As torchrun starts it."""
    with (
        open(destinations.stdouts[local_rank], "w") as stdout,
        open(destinations.stderrs[local_rank], "w") as stderr,
    ):
        command = [sys.executable, "-c", f"import os, signal, sys\n{program}"]
        subprocess.run(command, stdout=stdout, stderr=stderr)


def records(folder: Path, name: str = "output") -> list[dict[str, Any]]:
    return [r.data for r in read_folder(folder)[0] if r.name == name]


def texts(folder: Path, stream: str) -> list[str]:
    lines = (r["text"] for r in records(folder) if r["stream"] == stream)
    return "\n".join(lines).split("\n")


def test_a_cleaner_of_temporary_files_costs_no_output(
    kept: KeptOutput, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kept.redirect(inherited())
    shutil.rmtree(temporary)
    run_worker(kept.redirect(inherited()), "print('restarted')")
    kept.close()
    assert texts(folder, "stdout") == ["restarted"]


def test_output_is_passed_on_as_it_is_and_kept_with_its_rank(
    kept: KeptOutput, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    destinations = kept.redirect(inherited(workers=2))
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    run_worker(destinations, f"print('one\\ntwo', flush=True); os.write(2, b'last'); {killed}")
    run_worker(destinations, "print('three')", local_rank=1)
    kept.close()
    captured = capfd.readouterr()
    assert sorted(captured.out.split()) == ["one", "three", "two"]
    assert captured.err.endswith("last")
    assert sorted(texts(folder, "stdout")) == ["one", "three", "two"]
    assert texts(folder, "stderr") == ["last"]
    places = {(r["text"], r["local_rank"], r["rank"], r["generation"]) for r in records(folder)}
    assert ("three", 1, 5, 7) in places and ("last", 0, 4, 7) in places


def test_a_worker_that_replaces_another_begins_a_new_line(kept: KeptOutput, folder: Path) -> None:
    for text in ("dead", "new"):
        run_worker(kept.redirect(inherited()), f"os.write(1, b'{text}')")
    kept.close()
    assert texts(folder, "stdout") == ["dead", "new"]


def test_a_terminal_stays_one(
    kept: KeptOutput, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = os.openpty()
    tty.setraw(terminal)
    monkeypatch.setattr(output, "_CONSOLE", {"stdout": terminal, "stderr": terminal})
    run_worker(kept.redirect(inherited()), "print(sys.stdout.isatty(), sys.stderr.isatty())")
    kept.close()
    shown = b""
    while not shown.endswith(b"\n"):  # the words and the end of a line may be separate writes
        shown += os.read(screen, 100)
    assert shown == b"True True\n"
    assert texts(folder, "stdout") == ["True True"]
    os.close(screen)
    os.close(terminal)


def test_output_is_kept_when_nobody_reads_the_agents_stream(
    kept: KeptOutput, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, closed = os.pipe()
    os.close(reader)
    monkeypatch.setattr(output, "_CONSOLE", {"stdout": closed, "stderr": closed})
    run_worker(kept.redirect(inherited()), "print('one')\nprint('x' * 100_000)")
    kept.close()
    assert texts(folder, "stdout")[0] == "one"
    assert sum(map(len, texts(folder, "stdout"))) > 16_000  # a long line is shortened
    os.close(closed)


def test_a_failure_to_keep_output_stops_no_worker(
    kept: KeptOutput,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(channel: object, lines: object) -> None:
        raise RuntimeError("of the journal")

    destinations = kept.redirect(inherited())
    monkeypatch.setattr(kept, "_keep", fail)
    run_worker(destinations, "for _ in range(10): print('x' * 50_000, flush=True)")
    monkeypatch.undo()
    kept.close()
    assert capfd.readouterr().out.count("x") == 500_000
    assert len([r for r in caplog.records if "could not be kept" in r.message]) == 1


def test_files_of_torchrun_stay_with_it(kept: KeptOutput, folder: Path, tmp_path: Path) -> None:
    given = LogsDest(stdouts={0: "/logs/0/stdout.log"}, stderrs={0: os.devnull})
    assert kept.redirect(given) == given
    kept.close()
    redirected = records(folder, "output-redirected")
    assert [(r["stream"], r["path"]) for r in redirected] == [("stdout", "/logs/0/stdout.log")]


def test_lines_that_the_agent_logs_are_kept(kept: KeptOutput, folder: Path) -> None:
    get_logger().log(logging.WARNING, "etcd is %s", "slow")
    kept.close()
    get_logger().warning("after the end")
    assert [text for text in texts(folder, "log") if text.endswith("etcd is slow")]
    assert "after the end" not in str(records(folder))
