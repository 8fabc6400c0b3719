"""Runs of idioms: with one worker, with three, and with three of which one dies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from catalogue import Idiom

from checkpoints.memory import MemoryHost
from elastic.testing.small_world.world import CALLS, LINES, Death, RunOutcome, SmallWorld

SIZE = 3


@dataclass
class IdiomRuns:
    """Caches the undisturbed runs, with one worker and with three, of each idiom."""

    world: SmallWorld
    folder: Path
    _alone: dict[str, RunOutcome] = field(default_factory=dict)
    _undisturbed: dict[str, RunOutcome] = field(default_factory=dict)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def alone(self, idiom: Idiom) -> RunOutcome:
        """One worker, as in plain ``python script``: the reference for all other runs."""
        if idiom.name not in self._alone:
            folder = self.folder / idiom.name / "alone"
            self._alone[idiom.name] = self.world.run(idiom.path, folder, size=1)
        return self._alone[idiom.name]

    def refused(self, idiom: Idiom) -> RunOutcome:
        """As many workers as are needed to raise the error."""
        return self.world.run(idiom.path, self.folder / f"refused-{idiom.name}", size=idiom.workers)

    def undisturbed(self, idiom: Idiom) -> RunOutcome:
        """Three workers, none of which dies."""
        if idiom.name not in self._undisturbed:
            folder = self.folder / idiom.name / "undisturbed"
            self._undisturbed[idiom.name] = self.world.run(idiom.path, folder, size=SIZE)
        return self._undisturbed[idiom.name]

    def with_death(self, idiom: Idiom, death: Death, *, is_replaced: bool) -> RunOutcome:
        """Three workers, one of which dies."""
        folder = self.folder / idiom.name / f"death-{next(self._number)}"
        return self.world.run(idiom.path, folder, size=SIZE, death=death, is_replaced=is_replaced)

    def sharded(
        self,
        script: str,
        way: str,
        variant: str,
        size: int,
        death: Death | None,
        *,
        is_replaced: bool,
    ) -> RunOutcome:
        """Run the text of a script of a sharded model, with a node's memory: replicas of two ranks,
        or a node for each rank. Its arguments are ``way``, "replicas" or "build", ``variant``, the
        memory's folder, that of checkpoints, and the size of a replica."""
        folder = self.folder / f"sharded-{next(self._number)}"
        folder.mkdir(parents=True)
        path = folder / "script.py"
        path.write_text(script)
        shard = 2 if size > 1 else 1
        host = MemoryHost(folder / "memory")
        try:
            return self.world.run(
                path,
                folder,
                size=size,
                per_node=shard if way == "replicas" else 1,
                arguments=[way, variant, str(folder / "memory"), str(folder / "disk"), str(shard)],
                death=death,
                is_replaced=is_replaced,
            )
        finally:
            host.close()

    def with_random_death(
        self, idiom: Idiom, seed: int, alone: RunOutcome, *, is_replaced: bool
    ) -> RunOutcome:
        """Three workers, one of which dies at a line within ``run.retry`` determined by the seed.

        The number of lines is taken from the run with one worker, which saves an undisturbed run.
        A few scripts execute more lines with one worker, which reads all samples; if the line is
        therefore never reached, the line is drawn again from the lines of this undisturbed run.
        """
        draw = random.Random(f"{idiom.name}/{seed}")
        rank = draw.randrange(SIZE)
        alone.assert_success(workers=1)
        death = Death(rank=rank, event=draw.randint(1, alone.survivors[0].lines))
        outcome = self.with_death(idiom, death, is_replaced=is_replaced)
        if outcome.died_at or not outcome.survivors:
            return outcome
        outcome.assert_success(workers=SIZE)
        death = Death(rank=rank, event=draw.randint(1, outcome.workers[rank].lines))
        return self.with_death(idiom, death, is_replaced=is_replaced)

    def draw_death(self, idiom: Idiom, seed: int, counted: str = LINES) -> Death:
        """A death at any line within ``run.retry``, determined by the seed."""
        draw = random.Random(f"{idiom.name}/{seed}/{counted}")
        undisturbed = self.undisturbed(idiom)
        undisturbed.assert_success(workers=SIZE)
        rank = draw.randrange(SIZE)
        worker = undisturbed.workers[rank]
        # The number of calls varies slightly between runs, so the last ones may not be reached.
        last = int(worker.calls * 0.9) if counted == CALLS else worker.lines
        return Death(rank=rank, event=draw.randint(1, last), counted=counted)

    def draw_late_death(self, idiom: Idiom, seed: int) -> Death:
        """A death at a line of about the last step, determined by the seed."""
        draw = random.Random(f"{idiom.name}/{seed}/late")
        undisturbed = self.undisturbed(idiom)
        undisturbed.assert_success(workers=SIZE)
        rank = draw.randrange(SIZE)
        worker = undisturbed.workers[rank]
        return Death(rank=rank, event=worker.lines - draw.randrange(worker.lines // worker.steps))


def assert_same(idiom: Idiom, outcome: RunOutcome, alone: RunOutcome) -> None:
    """Steps equal those of one worker, and results agree among ranks and with one worker."""
    alone.assert_success(workers=1)
    expected = alone.survivors[0]
    first, *others = outcome.survivors
    for worker in outcome.survivors:
        assert worker.steps == expected.steps, outcome.describe()
    for other in others:
        what = f"{other.name} and {first.name}"
        _assert_close(other.result, first.result, lambda entry: 1e-9, what, outcome)
    if idiom.is_compared_alone:
        what = f"{first.name} and the script alone"
        _assert_close(first.result, expected.result, idiom.tolerance_of, what, outcome)


def assert_results(
    outcome: RunOutcome, expected: dict[str, torch.Tensor], *, tolerance: float
) -> None:
    """All survivors have these results, up to an absolute tolerance."""
    assert expected and outcome.survivors, outcome.describe()
    for worker in outcome.survivors:
        assert worker.result.keys() == expected.keys(), outcome.describe()
        for name, value in expected.items():
            torch.testing.assert_close(worker.result[name], value, rtol=0, atol=tolerance, msg=name)


def assert_as_undisturbed(idiom: Idiom, outcome: RunOutcome, undisturbed: RunOutcome) -> None:
    """The result equals that of the same number of workers without a death."""
    first, expected = outcome.survivors[0], undisturbed.survivors[0]
    what = f"{first.name} and {expected.name} undisturbed"
    _assert_close(first.result, expected.result, idiom.tolerance_of, what, outcome)


def _assert_close(
    result: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    tolerance_of: Callable[[str], float],
    what: str,
    outcome: RunOutcome,
) -> None:
    assert result.keys() == expected.keys()
    assert len(result) > 0, "the script has no result"
    for name, value in expected.items():
        tolerance = tolerance_of(name)
        got, wanted = result[name].double(), value.double()
        try:
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            message = f"{name} of {what}: {error}\n{outcome.describe()}"
            raise AssertionError(message) from None
