"""What happens to a generated script: who dies at which line, and what its workers do then."""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from composer import RESTART, Script, draw_script

from elastic.testing.small_world.world import (
    CALLS,
    LINES,
    RECOVER,
    STOP,
    WAIT,
    Death,
    RunOutcome,
    SmallWorld,
)

TOLERANCE = 1e-10
SILENT, REFUSED, HANG, ERROR, NOTHING = "silent", "refused", "hang", "error", ""
RECOVERED, REPLACED, RESUMED, RESTARTED = "survivors", "replaced", "resumed", "restarted"
LIMIT_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A script and what happens to it. Determined by a seed, or by hand.

    A place is a line of the script and how many times it has been executed; the line is given by
    its text, and the number of the same text before it, so that it is found in a smaller script.
    """

    seed: int
    script: Script
    way: str  # RECOVERED, …
    size: int
    rank: int  # -1: nobody dies
    line: str = ""
    number: int = 0  # of equal lines before it
    execution: int = 0
    call: int = 0  # instead of a line: any function's
    second: Death | None = None
    resumed_size: int = 0

    @property
    def description(self) -> str:
        """One line."""
        if self.rank < 0 or not (self.line or self.call):
            return f"{self.size} ranks, nobody dies"
        place = f"at `{self.line}` ({self.execution})" if self.line else f"in call {self.call}"
        text = f"{self.size} ranks, rank {self.rank} dies {place}, {self.way}"
        if self.second:
            text += f", then worker {self.second.rank} in call {self.second.event} of the recovery"
        if self.resumed_size:
            text += f" by {self.resumed_size} ranks"
        return text


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a scenario."""

    scenario: Scenario
    kind: str  # NOTHING, SILENT, …
    what: str = ""
    path: str = ""
    died_at: str = ""

    @property
    def failed(self) -> bool:
        return self.kind != NOTHING


def draw_scenario(seed: int) -> Scenario:
    """The script and the way of a seed; its place is drawn after the run alone."""
    draw = random.Random(seed)
    way = draw.choices([RECOVERED, REPLACED, RESUMED, RESTARTED], [50, 30, 10, 10])[0]
    recovery = RESTART if way == RESTARTED else ""
    script = draw_script(draw, recovery, has_checkpoints=way in (RESUMED, RESTARTED))
    size = draw.choice([2, 3, 3])
    if script.draws_by_rank:
        way = REPLACED if script.recovery != RESTART else way
        script = replace(script, has_checkpoints=script.recovery == RESTART)
    resumed = 0
    if way in (RESUMED, RESTARTED):
        resumed = size if script.draws_by_rank else draw.choice([1, 2, 3])
    second = None
    if way in (RECOVERED, REPLACED) and draw.random() < 0.2:
        others = [rank for rank in range(size + (way == REPLACED)) if rank]
        second = Death(
            rank=draw.choice(others),
            event=int(10 ** draw.uniform(0, 3.5)),
            counted=CALLS,
            is_in_recovery=True,
        )
        size = 3
    rank = draw.randrange(size)
    if second and second.rank == rank:
        rank = 0
    return Scenario(
        seed=seed,
        script=script,
        way=way,
        size=size,
        rank=rank,
        second=second,
        resumed_size=resumed,
    )


@dataclass
class Runner:
    """Runs scenarios in one small world. Keeps what fails in ``folder``."""

    world: SmallWorld
    folder: Path
    limit_s: float = LIMIT_S
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, scenario: Scenario) -> Verdict:
        """Train alone and as in the scenario, and compare."""
        folder = self.folder / f"{scenario.seed}-{next(self._numbers)}"
        folder.mkdir(parents=True)
        path = folder / "script.py"
        path.write_text(scenario.script.text(_note(scenario)))
        alone = self._train(scenario, path, folder / "alone", 1)
        if not alone.survivors or alone.problem:
            return self._verdict(scenario, alone, path, *_failure(alone, "alone: "))
        scenario = drawn_place(scenario, alone, path)
        path.write_text(scenario.script.text(_note(scenario)))
        reference = alone
        if scenario.script.draws_by_rank:
            reference = self._train(scenario, path, folder / "undisturbed", scenario.size)
            if len(reference.survivors) != scenario.size:
                kind, what = _failure(reference, "undisturbed: ")
                return self._verdict(scenario, reference, path, kind, what)
        outcome = self._disturbed(scenario, path, folder)
        kind, what = judge(scenario, outcome, reference)
        verdict = self._verdict(scenario, outcome, path, kind, what)
        if not verdict.failed:
            shutil.rmtree(folder)
        return verdict

    def _disturbed(self, scenario: Scenario, path: Path, folder: Path) -> RunOutcome:
        on_death = {RESUMED: STOP, RESTARTED: WAIT}.get(scenario.way, RECOVER)
        outcome = self._train(
            scenario, path, folder / "disturbed", scenario.size, on_death=on_death
        )
        if on_death == RECOVER or not outcome.died_at or outcome.problem:
            return outcome
        died_at = outcome.died_at
        resumed = self._train(
            scenario, path, folder / "resumed", scenario.resumed_size, checkpoints="disturbed"
        )
        return replace(resumed, died_at=died_at)

    def _train(
        self,
        scenario: Scenario,
        path: Path,
        folder: Path,
        size: int,
        *,
        on_death: str = "",
        checkpoints: str = "",
    ) -> RunOutcome:
        death = _death(scenario, path) if on_death else None
        saved = folder.parent / f"checkpoints-of-{checkpoints or folder.name}"
        return self.world.run(
            path,
            folder,
            size=size,
            arguments=[str(saved)] if scenario.script.has_checkpoints else [],
            death=death,
            second_death=scenario.second if on_death else None,
            is_replaced=scenario.way == REPLACED,
            on_death=on_death or RECOVER,
            limit_s=self.limit_s,
        )

    def _verdict(
        self, scenario: Scenario, outcome: RunOutcome, path: Path, kind: str, what: str
    ) -> Verdict:
        return Verdict(
            scenario=scenario, kind=kind, what=what, path=str(path), died_at=outcome.died_at
        )


def _note(scenario: Scenario) -> str:
    parts = "\n".join(f"  {label}" for label in scenario.script.labels)
    return f"A generated script: seed {scenario.seed}\n\n{scenario.description}.\n\nParts:\n{parts}"


def drawn_place(scenario: Scenario, alone: RunOutcome, path: Path) -> Scenario:
    """With the line of the death, if it has none yet: each executed line is equally likely."""
    if scenario.line or scenario.call or scenario.rank < 0:
        return scenario
    draw = random.Random(f"place of {scenario.seed}")
    worker = alone.survivors[0]
    lines = path.read_text().splitlines()
    number = draw.choice(sorted(worker.executions))
    text = lines[number - 1].strip()
    before = sum(line.strip() == text for line in lines[: number - 1])
    execution = draw.randint(1, worker.executions[number])
    return replace(scenario, line=text, number=before, execution=execution)


def _death(scenario: Scenario, path: Path) -> Death | None:
    if scenario.rank < 0:
        return None
    if scenario.call:
        return Death(rank=scenario.rank, event=scenario.call, counted=CALLS)
    numbers = [
        number
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.strip() == scenario.line
    ]
    if len(numbers) <= scenario.number:
        return None
    line = numbers[scenario.number]
    return Death(rank=scenario.rank, event=scenario.execution, counted=LINES, line=line)


def judge(scenario: Scenario, outcome: RunOutcome, reference: RunOutcome) -> tuple[str, str]:
    """The kind of a failure and its description; NOTHING if there is none."""
    if outcome.problem:
        return _failure(outcome)
    if not outcome.survivors:
        return _failure(outcome, "no survivor: ")
    first, *others = outcome.survivors
    expected = reference.survivors[0]
    for worker in outcome.survivors:
        if worker.steps != expected.steps:
            return SILENT, f"{worker.name} counts {worker.steps} steps instead of {expected.steps}"
    for other in others:
        if different := unequal(other.result, first.result):
            return SILENT, f"{other.name} and {first.name} differ: {different}"
    if different := distant(first.result, expected.result):
        return SILENT, f"differs from the run alone: {different}"
    return NOTHING, ""


def unequal(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """Names that are not equal bit for bit."""
    if result.keys() != expected.keys():
        return f"entries {sorted(result.keys() ^ expected.keys())}"
    names = [
        name
        for name, value in expected.items()
        if not torch.equal(torch.nan_to_num(result[name]), torch.nan_to_num(value))
    ]
    return ", ".join(names[:6])


def distant(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """The largest differences, if they exceed those of another order of sums."""
    if result.keys() != expected.keys():
        return f"entries {sorted(result.keys() ^ expected.keys())}"
    found: list[tuple[float, str]] = []
    for name, value in expected.items():
        got, wanted = result[name].double(), value.double()
        if got.shape != wanted.shape:
            found.append((float("inf"), name))
            continue
        scale = 1 + (float(wanted.abs().max()) if wanted.numel() else 0.0)
        distance = float((got - wanted).abs().max()) / scale if wanted.numel() else 0.0
        if not distance <= TOLERANCE:
            found.append((distance, name))
    found.sort(reverse=True)
    return ", ".join(f"{name} by {distance:.1e}" for distance, name in found[:4])


def _failure(outcome: RunOutcome, where: str = "") -> tuple[str, str]:
    errors = [worker.error for worker in outcome.workers if worker.error]
    if "limit" in outcome.problem:
        return HANG, where + outcome.problem
    if not errors:
        return ERROR, where + (outcome.problem or "no result")
    first = " ".join(errors[0].split())
    kind = REFUSED if first.startswith(REFUSALS) else ERROR
    return kind, where + first


REFUSALS = (
    "TrainingError",
    "ConfigError",
    "CheckpointRequired",
    "RankMismatch",
    "StateError",
)


def plain(scenario: Scenario) -> Scenario:
    """The same without a death."""
    return replace(scenario, rank=-1, line="", call=0, second=None)
