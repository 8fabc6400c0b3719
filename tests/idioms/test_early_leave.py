"""A rank that leaves the loop while others begin another step, and ranks that all leave it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch
from idiom_runs import IdiomRuns
from test_worst_places import BY_ITSELF, HEAD, STEP, TAIL, TRAINED

# Each leaves the loop after step 5 where `leaves(5)` is true.
WAYS = {
    "break, and a collective of the script": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            if leaves(epoch * 8 + i):
                break
        dist.barrier()
""",
    "break, and the next epoch": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            if leaves(epoch * 8 + i - 1):
                break
            STEP
""",
    "break inside of an inner with, and an average": """
def train():
    for epoch in run.epochs(2):
        batches = iter(loader)
        for i in range(loader.index, 8):
            inputs, targets = next(batches)
            with torch.enable_grad():
                STEP
                if leaves(epoch * 8 + i):
                    break
        else:
            continue
        break
    run.mean(1.0, loss=0.5)
""",
    "return": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            if leaves(epoch * 8 + i):
                return
""",
    "an exception that the script catches": """
def train():
    try:
        for epoch in run.epochs(2):
            for i, (inputs, targets) in enumerate(loader, start=loader.index):
                STEP
                if leaves(epoch * 8 + i):
                    raise StopIteration
    except StopIteration:
        pass
    run.mean(1.0, loss=0.5)
""",
    "break out of the epochs": """
def train():
    for epoch in run.epochs(4):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
        if leaves(epoch * 8 + 5):
            break
""",
    "a return of a loop of its own": """
def train():
    while run.state.setdefault("i", 0) < 16:
        run.begin()
        inputs, targets = dataset[:8]
        STEP
        run.state["i"] += 1
        run.commit()
        if leaves(run.state["i"] - 1):
            return
""",
}


# Rank 1 returns, and the others go on with something else than a step.
RETURNS = """
def train():
    for epoch in run.epochs(1):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
    if run.world.rank == 1:
        return
    run.mean(1.0, loss=0.5)
"""


def script_of(folder: Path, way: str, leaves: str) -> Path:
    """``leaves``: the body of the function that decides whether the loop is left after step i."""
    path = folder / "script.py"
    body = dedent(WAYS[way]).replace("STEP", STEP)
    path.write_text(f"{HEAD}\n{TRAINED}\ndef leaves(i):\n    {leaves}\n{body}\n{TAIL}")
    return path


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] if n > 2 else []) for n, way in enumerate(WAYS)],
)
def test_a_rank_that_leaves_the_loop_alone_is_named_by_all_ranks(
    runs: IdiomRuns, tmp_path: Path, way: str
) -> None:
    script = script_of(tmp_path, way, "return i == 5 and run.world.rank == 1")
    outcome = runs.world.run(script, tmp_path / "ranks", size=3)
    assert not outcome.survivors
    # The host ends the others once one has failed.
    ended = [worker for worker in outcome.workers if worker.exit_code is not None]
    assert ended, outcome.describe()
    done = 7 if "epochs" in way else 5
    for worker in ended:
        assert worker.exit_code == 1, outcome.describe()
        assert f"rank 1 left the loop after step {done}, while rank" in worker.error
        assert 'if run.mean(1.0, late=is_late)["late"] > 0' in worker.error
        assert "its arguments or data differ between nodes" in worker.error
    assert outcome.worlds == 1


def test_a_rank_that_returns_before_a_collective_of_the_others_is_named(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"{HEAD}\n{TRAINED}\n{RETURNS.replace('STEP', STEP)}\n{TAIL}")
    outcome = runs.world.run(path, tmp_path / "ranks", size=3)
    ended = [worker for worker in outcome.workers if worker.exit_code is not None]
    assert ended, outcome.describe()
    for worker in ended:
        assert "rank 1 left the loop after step 7, while rank" in worker.error
        assert "waits for it in a collective of step 7" in worker.error


def test_a_rank_that_leaves_after_the_first_step_of_a_world_is_named(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """The others compare their weights after that step, and wait for it there."""
    script = script_of(tmp_path, "return", "return i == 0 and run.world.rank == 1")
    outcome = runs.world.run(script, tmp_path / "ranks", size=3)
    ended = [worker for worker in outcome.workers if worker.exit_code is not None]
    assert ended, outcome.describe()
    for worker in ended:
        assert "rank 1 left the loop after step 0, while rank" in worker.error


EXITS = f"""{HEAD}
{TRAINED}
import sys
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            {STEP}
            if i == 5 and run.world.rank in RANKS:
                sys.exit()
try:
    run.retry(train)
except SystemExit:
    result = dict(model.state_dict())
"""


def test_a_rank_that_exits_cleanly_alone_is_named_by_all_ranks(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """torchrun would take it for finished, and the others for broken."""
    path = tmp_path / "script.py"
    path.write_text(EXITS.replace("RANKS", "[1]"))
    outcome = runs.world.run(path, tmp_path / "ranks", size=3)
    assert not outcome.survivors
    for rank, worker in enumerate(outcome.workers):
        if worker.exit_code is not None:
            error = "rank 1 left the loop after step 5, while rank"
            assert error in worker.error, outcome.describe()
            assert f"this rank ends because {error}" in worker.error or rank == 1
    assert "this rank ends" not in outcome.workers[1].error, outcome.describe()
    assert outcome.worlds == 1


def test_ranks_that_exit_cleanly_together_have_finished(runs: IdiomRuns, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(EXITS.replace("RANKS", "range(3)"))
    outcome = runs.world.run(path, tmp_path / "ranks", size=3)
    outcome.assert_success(workers=3)
    assert {worker.steps for worker in outcome.survivors} == {6}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ('raise ValueError("a bad sample")', "ValueError: a bad sample"),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_an_error_of_one_rank_is_not_taken_for_leaving(
    runs: IdiomRuns, tmp_path: Path, end: str, error: str
) -> None:
    """Python closes the loop's iterator before it runs `finally`. No excepthook is called for
    sys.exit(3)."""
    path = tmp_path / "script.py"
    path.write_text(f"""{HEAD}
{TRAINED}
def train():
    try:
        for epoch in run.epochs(2):
            for i, (inputs, targets) in enumerate(loader, start=loader.index):
                {STEP}
                if i == 5 and run.world.rank == 1:
                    import sys; {end}
    finally:
        print("closed the log")
{TAIL}""")
    outcome = runs.world.run(path, tmp_path / "ranks", size=3)
    assert outcome.workers[1].error == error, outcome.describe()
    assert not any("left the loop" in worker.error for worker in outcome.workers)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way,
            marks=pytest.mark.soak if "collective" in way else pytest.mark.slow if n > 2 else [],
        )
        for n, way in enumerate(WAYS)
    ],
)
def test_ranks_that_leave_together_continue(runs: IdiomRuns, tmp_path: Path, way: str) -> None:
    script = script_of(tmp_path, way, "return i == 5")
    outcome = runs.world.run(script, tmp_path / "ranks", size=3)
    outcome.assert_success(workers=3)
    first, *others = outcome.survivors
    for other in others:
        assert other.steps == first.steps
        for name, value in first.result.items():
            assert torch.equal(other.result[name], value)


def test_a_death_while_ranks_leave_is_repaired(runs: IdiomRuns, tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        "return",
        """if i == 5 and run.world.size == 3 and run.world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return i >= 5""",
    )
    outcome = runs.world.run(script, tmp_path / "killed", size=3, death=BY_ITSELF)
    outcome.assert_success(workers=2)
    # The survivors have left, too, and are called again: they leave in the same step.
    assert {worker.steps for worker in outcome.survivors} == {6}, outcome.describe()


def test_a_rank_evaluates_alone_after_the_loop(runs: IdiomRuns, tmp_path: Path) -> None:
    """The last one returns without waiting, the others wait long in the same collective."""
    path = tmp_path / "script.py"
    path.write_text(f"""{HEAD}
import time
{TRAINED}
def train():
    for epoch in run.epochs(1):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            {STEP}
            if i == 5:
                break
        if run.world.rank == 2:
            model.eval()
            with torch.no_grad():
                F.mse_loss(model(x), dataset.tensors[1])
            time.sleep(1.2)  # longer than a long wait
        score = torch.ones(1)
        dist.broadcast(score, src=0)
{TAIL}""")
    outcome = runs.world.run(path, tmp_path / "ranks", size=3)
    outcome.assert_success(workers=3)
