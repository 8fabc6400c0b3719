"""Scripts that catch exceptions around the step still recover from the failure of a peer."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch
from idiom_runs import IdiomRuns
from test_worst_places import BY_ITSELF, HEAD, STEP, TAIL, TRAINED

# Survivors learn of the death between two steps: no collective of theirs fails.
UNNOTICED = """
import time

def die_unnoticed(step, at):
    world = run.world
    if step == at and world.size == 3 and world.generation == 1:
        dist.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while not run._parts.session.worlds.is_superseded():
            time.sleep(0.01)
"""

LOOPS = {
    "a collective before the forward pass": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            try:
                die(epoch * 8 + i, at)
                STEP
            except RuntimeError:
                continue
""",
    "a collective after the update": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            try:
                STEP
                die(epoch * 8 + i, at)
            except Exception as error:
                print("skipped", error)
""",
    "the backward pass, and the loop goes on with what it has": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            try:
                die(epoch * 8 + i, at)
                loss.backward()
            except RuntimeError:
                pass
            optimizer.step()
""",
    "fetching the next batch": """
def train():
    for epoch in run.epochs(2):
        batches, i = iter(loader), loader.index
        while True:
            try:
                inputs, targets = next(batches)
                STEP
                die_unnoticed(epoch * 8 + i, at)
                i += 1
            except StopIteration:
                break
            except Exception as error:
                print("skipped", error)
""",
    "an epoch": """
def train():
    for epoch in run.epochs(2):
        try:
            for i, (inputs, targets) in enumerate(loader, start=loader.index):
                STEP
                die_unnoticed(epoch * 8 + i, at)
        except Exception as error:
            print("gave up the epoch", error)
""",
    "all of it": """
def train():
    try:
        for epoch in run.epochs(2):
            for i, (inputs, targets) in enumerate(loader, start=loader.index):
                STEP
                die_unnoticed(epoch * 8 + i, at)
    except Exception as error:
        print("gave up", error)
""",
    "another exception in place of it": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            try:
                die(epoch * 8 + i, at)
                STEP
            except RuntimeError:
                raise ValueError("training failed") from None
""",
}


# One in each part of a step; the others go the same ways.
IN_MAKE_TEST = (
    "a collective after the update",
    "the backward pass, and the loop goes on with what it has",
)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=[] if loop in IN_MAKE_TEST else [pytest.mark.slow])
        for loop in LOOPS
    ],
)
def test_a_fault_caught_by_the_script_loses_no_step(
    runs: IdiomRuns, tmp_path: Path, loop: str
) -> None:
    script = tmp_path / "script.py"
    body = dedent(LOOPS[loop]).replace("STEP", STEP)
    script.write_text(f"{HEAD}\nat = 5\n{UNNOTICED}\n{TRAINED}\n{body}\n{TAIL}")
    alone = runs.world.run(script, tmp_path / "alone", size=1)
    alone.assert_success(workers=1)
    outcome = runs.world.run(script, tmp_path / "killed", size=3, death=BY_ITSELF)
    outcome.assert_success(workers=2)
    assert outcome.worlds == 2
    for survivor in outcome.survivors:
        assert survivor.steps == 16, outcome.describe()
        for name, expected in alone.survivors[0].result.items():
            is_close = torch.allclose(survivor.result[name], expected, rtol=1e-6, atol=1e-6)
            assert is_close, f"{name} of {survivor.name}\n{outcome.describe()}"
