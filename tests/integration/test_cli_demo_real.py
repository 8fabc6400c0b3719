"""``elastic demo`` with real processes: three nodes, one killed, one added, every guarantee
checked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.cli import run
from elastic.cli.demo import ADDED, STEPS, VICTIM
from elastic.cli.last_known import summary as summary_of_journals
from elastic.telemetry.runs import local_runs
from elastic.testing.forks.program import start_python
from elastic.testing.forks.server import SLOW_START
from elastic.testing.waiting import eventually

DEADLINE_S = 540.0


# Node-3's agent and its worker each start this much later, as on a cold installation: in total,
# longer than the training takes without waiting.
DELAY_S = 15
DELAYS_START = f"""
import os, sys, time
words = " ".join(sys.orig_argv)
if os.environ.get("ELASTIC_NODE_NAME") == "{ADDED}" and "digits.py" in words:
    time.sleep({DELAY_S})
"""


def start(folder: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    return start_python(
        [sys.executable, "-m", "elastic.cli.main", "demo", *words],
        env={**os.environ, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder / "state"), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slowly_forked(folder: Path) -> dict[str, str]:
    return {SLOW_START: f"{ADDED}:{DELAY_S}"}


def slowly_as_in_production(folder: Path) -> dict[str, str]:
    """With another PYTHONPATH, all processes start and import as in production."""
    hook = folder / "slow"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(DELAYS_START)
    return {"PYTHONPATH": os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [slowly_forked, pytest.param(slowly_as_in_production, marks=pytest.mark.soak)],
)
def test_the_demo_with_a_slow_joining_node_passes_all_checks_and_cleans_up(
    tmp_path: Path, environment: Callable[[Path], dict[str, str]]
) -> None:
    demo = start(tmp_path, "-o", "json", **environment(tmp_path))
    out, err = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 0, err
    killed = re.search(r"^(\S+) .* is killed", err, re.MULTILINE)
    noticed = re.search(r"^(\S+) .* noticed the loss", err, re.MULTILINE)
    assert killed and noticed and killed[1] <= noticed[1], err
    summary = json.loads(out)
    assert summary["ok"] and summary["failures"] == []
    assert summary["accuracy"] >= 0.97
    by_cause = {g["cause"]: g["nodes"] for g in summary["generations"]}
    assert VICTIM not in by_cause["lost"], summary["generations"]
    assert ADDED in by_cause["joined"], summary["generations"]
    assert summary["steps"] == STEPS
    assert all((s["once"], s["twice"], s["never"]) == (1437, 0, 0) for s in summary["samples"])
    # Only its report remains, and what `elastic list` and others read.
    (run,) = local_runs({"XDG_STATE_HOME": str(tmp_path / "state")})
    known = summary_of_journals(run.journal, run.run_id)
    assert (known.outcome, known.step) == ("success", STEPS)
    assert [str(path) for path in tmp_path.glob("elastic-demo-*")] == [summary["report"]]
    page = Path(summary["report"]).read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "The job succeeded after " in page
    assert f"{STEPS} steps on 2 to 3 nodes" in page
    assert '<h2 id="curves">Loss</h2>' in page
    assert f">{VICTIM}</text>" in page and "lost</text>" in page


@pytest.mark.slow
def test_an_interrupt_terminates_all_processes_cleanly(tmp_path: Path) -> None:
    demo = start(tmp_path)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "epoch 0" in line:
            break
    tree = run.tree(demo.pid)
    assert len(tree) > 6  # three agents with a worker each, and etcd
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=DEADLINE_S)
    assert demo.returncode == 130, err
    assert "Traceback" not in err
    eventually(lambda: not any(run.tree(pid) for pid in tree), "the end of its processes")
    assert not list(tmp_path.glob("elastic-demo-*"))
