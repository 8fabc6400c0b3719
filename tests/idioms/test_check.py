"""``elastic check``: its verdicts on exact, differing and refused scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from catalogue import REFUSED, SCRIPTS
from idiom_runs import IdiomRuns

from elastic.cli.check import Check, CheckedRun, CheckReport, as_json, main, parser

BEGINNING = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(240, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
run = elastic.join(checkpoints="saved-by-the-script")
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
"""

# Behind a partial, which the analysis of the source does not follow: it would be refused.
# In a way that the analysis of the source does not follow.
RATE_BY_A_COUNTER = """
def train():
    count = 0
    def lower_rate():
        nonlocal count
        count += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / count
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            max([lower_rate], key=id)()
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

run.retry(train)
"""

AVERAGE_OF_OUTPUTS = """
def train():
    center = torch.zeros(1, 2)
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = F.mse_loss(outputs, targets)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            center = 0.9 * center + outputs.detach().mean()

run.retry(train)
"""

SUM_OF_LOSSES = """
def train():
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets, reduction="sum").backward()
            optimizer.step()

run.retry(train)
"""


def check(runs: IdiomRuns, folder: Path, script: Path, *flags: str) -> CheckReport:
    """The report of all runs of a script."""
    return Check(parser().parse_args([*flags, str(script)]), runs.world, folder / "runs").run()


def written(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(BEGINNING + text)
    return script


def deaths(report: CheckReport) -> list[CheckedRun]:
    return [run for run in report.runs if run.rank is not None]


def test_an_exact_script(runs: IdiomRuns, tmp_path: Path) -> None:
    report = check(runs, tmp_path, SCRIPTS / "plain_loop.py", "--deaths=2", "--steps=12")
    assert report.is_exact, report.runs
    alone, undisturbed, replaced, alone_after = report.runs
    assert alone.message == "8 steps, 96 samples"
    assert undisturbed.message == "as alone: same weights, 8 of 8 steps, 96 of 96 samples"
    assert (replaced.is_replaced, alone_after.is_replaced) == (True, False)
    for killed in (replaced, alone_after):
        assert killed.line and f"in line {killed.line} (" in killed.name
        assert killed.message == "same weights, 8 of 8 steps, 96 of 96 samples"
    assert json.loads(json.dumps(as_json(report)))["exact"] is True


@pytest.mark.slow
def test_a_counter_outside_of_the_state(runs: IdiomRuns, tmp_path: Path) -> None:
    """The weights differ from the first step after the recovery on, and the line is named."""
    script = written(tmp_path, RATE_BY_A_COUNTER)
    report = check(runs, tmp_path, script, "--deaths=1", "--steps=30", "--seed=1")
    assert not report.is_exact
    (killed, restarted) = deaths(report)
    assert killed.verdict == restarted.verdict == "differs"
    assert killed.first_step is not None and killed.first_step > 1
    assert f"after step {killed.first_step}: optimizer.param_groups.0.lr" in killed.message
    line = script.read_text().splitlines().index("    count = 0") + 1
    assert any(f"count (line {line}: count = 0)" in advice for advice in killed.advice)
    assert any('run.state["count"]' in advice for advice in killed.advice)
    assert not Path("saved-by-the-script").exists()


@pytest.mark.slow
def test_an_epoch_that_is_cut_by_islice(runs: IdiomRuns, tmp_path: Path) -> None:
    """When its last step is committed depends on the ranks and on where a pass resumes."""
    loop = "for i, (inputs, targets) in itertools.islice(enumerate(loader), 3):"
    text = (SCRIPTS / "plain_loop.py").read_text()
    cut = text.replace("for inputs, targets in loader:", loop)
    assert cut != text
    script = tmp_path / "script.py"
    script.write_text(f"import itertools\n{cut}")
    report = check(runs, tmp_path, script, "--deaths=0", "--steps=8")
    assert report.is_exact, report.runs


def test_a_refused_script(runs: IdiomRuns, tmp_path: Path) -> None:
    report = check(runs, tmp_path, REFUSED / "cycle.py")
    assert not report.is_exact
    (alone,) = report.runs
    assert alone.verdict == "refused"
    text = (REFUSED / "cycle.py").read_text().splitlines()[alone.line - 1].strip()
    assert "itertools.cycle(loader)" in text
    assert alone.advice[0] == f"line {alone.line}: {text}"
    assert "def endless(loader)" in alone.advice[1]


def test_a_script_without_elastic_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from elastic.cli.main import main as elastic

    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    for arguments, words in (
        ([str(script)], "does not call elastic.join()"),
        ([str(tmp_path / "none.py")], "is not a file"),
        (["--size=1", str(script)], "1 is less than 2"),
    ):
        assert elastic(["check", *arguments]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_an_average_that_the_job_does_not_know(runs: IdiomRuns, tmp_path: Path) -> None:
    report = check(runs, tmp_path, written(tmp_path, AVERAGE_OF_OUTPUTS), "--deaths=1")
    killed = deaths(report)[0]
    assert killed.verdict == "differs"
    assert killed.message == "same weights, but not center"
    assert any("center = torch.zeros(1, 2)" in advice for advice in killed.advice)


@pytest.mark.slow
def test_a_loss_that_is_no_mean(runs: IdiomRuns, tmp_path: Path) -> None:
    """Without a fault: three ranks train other weights than one."""
    report = check(runs, tmp_path, written(tmp_path, SUM_OF_LOSSES), "--deaths=0")
    assert report.runs[1].verdict == "differs"
    assert report.runs[1].first_step == 1
    assert "mean over the batch" in report.runs[1].advice[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "batch_norm"])
def test_a_script_that_depends_on_the_number_of_ranks(
    runs: IdiomRuns, tmp_path: Path, name: str
) -> None:
    report = check(runs, tmp_path, SCRIPTS / f"{name}.py", "--deaths=2")
    assert report.is_exact, report.runs
    assert report.runs[1].verdict == "depends"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "accumulate",
        "begin_and_commit",
        "early_stopping",
        "gan",
        "two_loaders_in_turn",
        "zipped_loaders",
    ],
)
def test_everyday_loops_are_exact(runs: IdiomRuns, tmp_path: Path, name: str) -> None:
    report = check(runs, tmp_path, SCRIPTS / f"{name}.py", "--deaths=4")
    assert report.is_exact, report.runs


@pytest.mark.slow
def test_the_command_prints_its_table_and_keeps_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    script = str(SCRIPTS / "plain_loop.py")
    assert main(["--deaths=1", "--steps=6", f"--logs={logs}", script]) == 0
    captured = capsys.readouterr()
    assert "exact: 3 runs of plain_loop.py" in captured.out
    assert "more runs of 4 steps, about" in captured.err
    assert (logs / "alone" / "worker-0.log").exists()
