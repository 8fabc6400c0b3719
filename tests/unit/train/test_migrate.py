"""The ports in ``examples/migrate``: their size, and that a killed worker changes no result.

The scripts run unchanged, between a prologue that sets the folder and the arguments, and an
epilogue that writes the compared values. They use double precision, since the order of summation
depends on the world size.
"""

from __future__ import annotations

import itertools
import random
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from elastic.testing.small_world.world import Death, RunOutcome, SmallWorld

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "migrate"
SIZE = 3
TOLERANCE = 1e-6
SEEDS = (
    0,
    pytest.param(1, marks=pytest.mark.slow),
    *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 10)),
)
# As torchrun sets it for one process.
ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
# Ends the process at an optimizer step, once a checkpoint of an earlier one is complete.
KILL = """
def kill_at(step, saved):
    import itertools, os, pathlib, signal, time
    from torch.optim.optimizer import register_optimizer_step_post_hook
    import checkpoints
    count = itertools.count(1)
    def after_step(*_):
        if next(count) < step:
            return
        until_s = time.monotonic() + 60
        while (found := checkpoints.latest(saved).checkpoint) is None:
            assert time.monotonic() < until_s, "nothing was saved"
            time.sleep(0.01)
        print("killed after", found.name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    register_optimizer_step_post_hook(after_step)
kill_at(*{})
"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A pair of scripts, and how the tests run them."""

    name: str
    most_changed_lines: int
    arguments: tuple[str, ...]
    model: str  # an expression at the end of after.py
    saved: str  # its checkpoints
    kill_at_step: int
    needs_torchrun: bool = False  # before.py

    def script(self, which: str) -> Path:
        return EXAMPLES / self.name / f"{which}.py"


TUTORIAL = Example(
    name="ddp_tutorial",
    most_changed_lines=16,
    arguments=("2", "1", "--batch_size", "20"),
    model="run._parts.session.job.modules['model'].module.state_dict()",
    saved="checkpoints",
    kill_at_step=60,
    needs_torchrun=True,
)
NANOGPT = Example(
    name="nanogpt",
    most_changed_lines=30,
    arguments=(),
    model="{**raw_model.state_dict(), 'iter_num': torch.tensor(run.state['iter_num'])}",
    saved="out/elastic",
    kill_at_step=17,
)
IMAGENET = Example(
    name="imagenet",
    most_changed_lines=30,
    arguments=("--epochs", "2"),
    model="{**model.state_dict(), 'best': torch.tensor(run.state['best_acc1'])}",
    saved="checkpoints",
    kill_at_step=17,
    needs_torchrun=True,
)
EXAMPLES_OF_PORTS = (TUTORIAL, NANOGPT, IMAGENET)
ALL = pytest.mark.parametrize(
    "example",
    [
        pytest.param(port, id=port.name, marks=[] if port is TUTORIAL else [pytest.mark.slow])
        for port in EXAMPLES_OF_PORTS
    ],
)


@dataclass
class Runs:
    """Runs of the scripts in a small world; undisturbed runs are made once."""

    world: SmallWorld
    folder: Path
    _kept: dict[str, RunOutcome] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def run(
        self,
        example: Example,
        which: str,
        *,
        size: int,
        place: Path | None = None,
        before: str = "",
        death: Death | None = None,
        is_replaced: bool = False,
    ) -> RunOutcome:
        """In ``place``, the working directory; by default a new one."""
        folder = self.folder / f"{example.name}-{which}-{next(self._number)}"
        place = place or folder / "place"
        for made in (folder, place):
            made.mkdir(parents=True, exist_ok=True)
        source = example.script(which)
        begin = (
            f"import os, sys, torch; os.chdir({str(place)!r}); "
            f"sys.path.insert(0, {str(source.parent)!r}); sys.argv[1:] = {example.arguments!r}; "
            f"torch.set_default_dtype(torch.float64)\n{before}"
        )
        result = example.model if which == "after" else "{'ended': torch.ones(1)}"
        script = folder / "train.py"
        script.write_text(f"{begin}{source.read_text()}\nresult = {result}\n")
        return self.world.run(
            script, folder / "logs", size=size, death=death, is_replaced=is_replaced
        )

    def place_of(self, example: Example, size: int) -> Path:
        """The working directory of the run of :meth:`kept`, with its checkpoints."""
        return self.folder / f"{example.name}-{size}"

    def kept(self, example: Example, size: int) -> RunOutcome:
        """after.py, undisturbed; size 1 is plain ``python``."""
        name = f"{example.name} {size}"
        if name not in self._kept:
            place = self.place_of(example, size)
            self._kept[name] = self.run(example, "after", size=size, place=place)
            self._kept[name].assert_success(workers=size)
        return self._kept[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with SmallWorld() as world:
        yield Runs(world, tmp_path_factory.mktemp("migrate"))


def assert_same(example: Example, outcome: RunOutcome, runs: Runs) -> None:
    """All workers have the weights of an undisturbed process after as many steps."""
    expected = runs.kept(example, 1).survivors[0]
    for worker in outcome.survivors:
        assert worker.steps == expected.steps, outcome.describe()
        assert worker.result.keys() == expected.result.keys()
        for name, value in expected.result.items():
            is_close = torch.allclose(worker.result[name], value, rtol=TOLERANCE, atol=TOLERANCE)
            assert is_close, f"{name} of {worker.name}\n{outcome.describe()}"


@pytest.mark.slow
@ALL
def test_the_ordinary_script_runs_alone(runs: Runs, example: Example) -> None:
    before = f"os.environ.update({ONE_PROCESS!r})\n" if example.needs_torchrun else ""
    runs.run(example, "before", size=1, before=before).assert_success(workers=1)


@pytest.mark.slow
@ALL
def test_the_ordinary_script_runs_in_a_world_of_two(runs: Runs, example: Example) -> None:
    runs.run(example, "before", size=2).assert_success(workers=2)


@ALL
def test_the_port_trains_identically_in_a_world_of_three(runs: Runs, example: Example) -> None:
    assert_same(example, runs.kept(example, SIZE), runs)


@pytest.mark.parametrize("seed", SEEDS)
@ALL
def test_a_kill_at_a_random_line_of_the_port_changes_no_result(
    runs: Runs, example: Example, seed: int
) -> None:
    draw = random.Random(f"{example.name}/{seed}")
    rank = draw.randrange(SIZE)
    lines = runs.kept(example, SIZE).workers[rank].lines
    death = Death(rank=rank, event=draw.randint(1, lines))
    is_replaced = seed % 2 == 1
    outcome = runs.run(example, "after", size=SIZE, death=death, is_replaced=is_replaced)
    outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert outcome.died_at, f"{death} was not reached"
    assert_same(example, outcome, runs)


@pytest.mark.slow
@ALL
def test_a_killed_job_resumes_with_another_number_of_workers(
    runs: Runs, example: Example, tmp_path: Path
) -> None:
    kill = KILL.format((example.kill_at_step, example.saved))
    (killed,) = runs.run(example, "after", size=1, place=tmp_path, before=kill).workers
    assert killed.exit_code is None, killed.log
    assert "killed after step-" in killed.log
    outcome = runs.run(example, "after", size=2, place=tmp_path)
    outcome.assert_success(workers=2)
    assert "state-restored source='step-" in outcome.workers[0].log
    assert_same(example, outcome, runs)


@ALL
def test_a_complete_job_does_not_train_further(runs: Runs, example: Example) -> None:
    assert "state-restored source='initial'" in runs.kept(example, 1).workers[0].log
    outcome = runs.run(example, "after", size=1, place=runs.place_of(example, 1))
    outcome.assert_success(workers=1)
    assert "state-restored source='step-" in outcome.workers[0].log
    assert_same(example, outcome, runs)


@pytest.mark.parametrize("example", EXAMPLES_OF_PORTS, ids=lambda example: example.name)
def test_a_port_is_small(example: Example) -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "migration_diffs.py"))
    changed = page["changed_lines"](example.script("before"), example.script("after"))
    assert 0 < changed <= example.most_changed_lines
