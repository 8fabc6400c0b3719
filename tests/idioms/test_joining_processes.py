"""State in local variables is detected if it changes the result.

A joining process does not have that state, and the other processes lose it in a recovery.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from idiom_runs import IdiomRuns
from test_worst_places import BY_ITSELF, HEAD, STEP, TAIL, TRAINED

# No step between the death and the end of the job triggers the periodic comparison.
LATE = 9

LOOPS = {
    "a learning rate from an attribute that counts": (
        """
class Schedule:
    count = 0
run.untracked("Schedule.count")  # or it would be refused
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            for group in optimizer.param_groups:
                group["lr"] = 0.0001 * 0.8 ** Schedule.count
            die(epoch * 8 + i, at)
            STEP
            Schedule.count += 1
""",
        "optimizer has different settings on rank 2 (lr=0.0001) and rank 0",
    ),
    "noise from a generator of the script's own": (
        """
generator = torch.Generator().manual_seed(0)
run.untracked("generator")  # or it would be refused
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            for p in model.parameters():
                p.grad += torch.randn(p.shape, generator=generator)
            die(epoch * 8 + i, at)
            optimizer.step()
""",
        "has different weights from rank 0 in model",
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_joining_process_that_diverges_is_detected(
    runs: IdiomRuns, tmp_path: Path, loop: str
) -> None:
    body, message = LOOPS[loop]
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}\nat = {LATE}\n{TRAINED}{body.replace('STEP', STEP)}{TAIL}")
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    assert not outcome.survivors, outcome.describe()
    assert message in outcome.describe()
    assert f"after step {LATE}, " in outcome.describe()


COUNTS = {
    "a learning rate from an attribute that counts": (
        """
class Schedule:
    def __init__(self):
        self.count = 0
run.untracked("schedule.count")  # or it would be refused
def train():
    schedule = Schedule()
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            for group in optimizer.param_groups:
                group["lr"] = 0.001 * 0.8 ** schedule.count
            die(epoch * 8 + i, at)
            STEP
            schedule.count += 1
""",
        f"step {LATE} is repeated with lr=0.001 for optimizer (previously lr=0.000134",
    ),
}


@pytest.mark.parametrize("loop", COUNTS)
def test_a_reset_counter_causes_a_warning(runs: IdiomRuns, tmp_path: Path, loop: str) -> None:
    body, message = COUNTS[loop]
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}\nat = {LATE}\n{TRAINED}{body.replace('STEP', STEP)}{TAIL}")
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF)
    outcome.assert_success(workers=2)
    assert message in outcome.describe()


def test_learning_rates_computed_from_the_step_cause_no_warning(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    body = """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            for group in optimizer.param_groups:
                group["lr"] = 0.001 * 0.8 ** (epoch * 8 + i)
            die(epoch * 8 + i, at)
            STEP
"""
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}\nat = {LATE}\n{TRAINED}{body.replace('STEP', STEP)}{TAIL}")
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    outcome.assert_success(workers=3)
    assert "WARNING" not in outcome.describe()


@pytest.mark.parametrize("at", [8, *(pytest.param(at, marks=pytest.mark.slow) for at in (9, 11))])
def test_an_accumulation_with_shifted_boundaries_is_rejected(
    runs: IdiomRuns, tmp_path: Path, at: int
) -> None:
    """A recovery repeats all batches of the optimizer step; a counter that outlives the function is
    then wrong.
    """
    body = """
count = 0
def train():
    global count
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            count += 1
            (F.mse_loss(model(inputs), targets) / 4).backward()
            die(epoch * 8 + i, AT)
            if count % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}\n{TRAINED}{body.replace('AT', str(at))}{TAIL}")
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF)
    counted = at - 7  # in the interrupted group
    if counted == 4:
        outcome.assert_success(workers=2)
        return
    assert not outcome.survivors, outcome.describe()
    expected = f"step {11 - counted} used the gradients of {4 - counted} batches"
    assert expected in outcome.describe()
