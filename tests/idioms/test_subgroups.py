"""``examples/subgroups.py``: user-defined process groups end with the world of a dead worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from idiom_runs import IdiomRuns

from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome

EXAMPLE = Path(__file__).parents[2] / "examples" / "subgroups.py"
SIZE = 4  # two pairs; without one of the ranks, one pair and a single leader


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, with fewer samples, and its weights as the result."""
    text = EXAMPLE.read_text()
    call = '\nif __name__ == "__main__":\n    main()\n'
    assert text.endswith(call)
    own = (
        'import sys\nsys.argv = ["", "--samples=96", "--epochs=2"]\nresult = main().state_dict()\n'
    )
    path = tmp_path_factory.mktemp("subgroups") / "script.py"
    path.write_text(text.removesuffix(call) + own)
    return path


@pytest.fixture(scope="module")
def alone(runs: IdiomRuns, script: Path) -> dict[str, torch.Tensor]:
    outcome = runs.world.run(script, script.parent / "alone", size=1)
    outcome.assert_success(workers=1)
    return outcome.survivors[0].result


@pytest.fixture(scope="module")
def undisturbed(runs: IdiomRuns, script: Path) -> RunOutcome:
    outcome = runs.world.run(script, script.parent / "undisturbed", size=SIZE)
    outcome.assert_success(workers=SIZE)
    return outcome


@pytest.mark.parametrize("counted", [LINES, pytest.param(CALLS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_subgroups_are_recreated_in_the_world_after_a_death(
    runs: IdiomRuns,
    script: Path,
    undisturbed: RunOutcome,
    alone: dict[str, torch.Tensor],
    seed: int,
    counted: str,
) -> None:
    draw = random.Random(f"subgroups/{seed}/{counted}")
    rank, is_replaced = draw.randrange(SIZE), draw.random() < 0.5
    worker = undisturbed.workers[rank]
    last = worker.lines if counted == LINES else int(worker.calls * 0.9)
    death = Death(rank=rank, event=draw.randint(1, last), counted=counted)
    folder = script.parent / f"death-{counted}-{seed}"
    outcome = runs.world.run(script, folder, size=SIZE, death=death, is_replaced=is_replaced)
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    for survivor in outcome.survivors:
        for name, value in alone.items():
            torch.testing.assert_close(survivor.result[name], value, rtol=0, atol=1e-4)
