"""What happens to a generated script: who dies at which line, and what its workers do then."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from composer import BUILD, MESH, REPLICAS, RESTART, WHOLE, Script, draw_script
from script_parts import BY_LABEL, DEFAULTS

from checkpoints.memory import MemoryHost
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

TOLERANCE, FLOAT32_TOLERANCE = 1e-10, 1e-4
SILENT, REFUSED, HANG, ERROR, NOTHING = "silent", "refused", "hang", "error", ""
RECOVERED, REPLACED, RESUMED, RESTARTED = "survivors", "replaced", "resumed", "restarted"
LIMIT_S = 40.0
_DEATHS_WITHIN_THE_LIMIT = 6  # with more, a run may take longer
SEEDS_OF_A_SCRIPT = 3


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
    is_in_call: bool = False  # of any function, instead of at a line of the script
    call: int = 0
    later: tuple[Death, ...] = ()  # of other workers, of replacements, or after each resumption
    resumed_size: int = 0
    is_started_again: bool = False  # once more, after it has ended

    @property
    def description(self) -> str:
        """One line."""
        if self.rank < 0 or not (self.line or self.call):
            return f"{self.size} ranks, nobody dies"
        place = f"at `{self.line}` ({self.execution})" if self.line else f"in call {self.call}"
        text = f"{self.size} ranks, rank {self.rank} dies {place}, {self.way}"
        text += f" by {self.resumed_size} ranks" if self.resumed_size else ""
        for death in self.later:
            text += f", then worker {death.rank} ({death.counted} {death.event} of a later world)"
        return text + ", and started again after its end" * self.is_started_again

    def size_of(self, attempt: int) -> int:
        """Ranks of an attempt to resume; 0 is the first job."""
        return self.resumed_size if attempt % 2 else self.size


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

    def describe(self) -> str:
        """A few lines, with what reproduces it."""
        scenario, script = self.scenario, self.scenario.script
        return "\n".join(
            [
                f"seed {scenario.seed}: {self.kind.upper()}: {self.what[:400]}",
                f"  {script.way}, {scenario.description}",
                f"  parts: {', '.join(script.added) or 'none'}",
                f"  died at {self.died_at or 'no line'}",
                f"  {self.path}",
            ]
        )


def draw_scenario(seed: int, *, with_open: bool = False) -> Scenario:
    """The scenario of a seed. Its place is drawn after the run alone, which three seeds share.

    ``with_open``: also with parts that are known not to be exact yet.
    """
    draw = random.Random(f"script {seed // SEEDS_OF_A_SCRIPT}")
    sharding = draw.choices([WHOLE, REPLICAS, MESH, BUILD], [91, 3, 3, 3])[0]
    ways = [RECOVERED, REPLACED] if sharding else [RECOVERED, REPLACED, RESUMED, RESTARTED]
    way = draw.choices(ways, [20, 66, 7, 7][: len(ways)])[0]
    script = draw_script(
        draw,
        RESTART if way == RESTARTED else "",
        has_checkpoints=way in (RESUMED, RESTARTED),
        sharding=sharding,
        with_open=with_open,
    )
    if script.draws_by_rank and way == RECOVERED:
        way = REPLACED  # fewer ranks would draw other numbers
    draw = random.Random(f"deaths {seed}")
    deaths = draw.choice(_DEATHS[way] if sharding in (WHOLE, REPLICAS, MESH) else [1])
    if sharding and way == RECOVERED:
        deaths = 1  # of two replicas
    size = {WHOLE: draw.choice([2, 2, 3]), BUILD: 3}.get(sharding, 4)
    if way == RECOVERED:
        size = max(size, deaths + 1)
    scenario = Scenario(
        seed=seed,
        script=script,
        way=way,
        size=size,
        rank=draw.randrange(size),
        is_in_call=draw.random() < 0.15,
    )
    if way in (RESUMED, RESTARTED):
        resumed_size = size if script.draws_by_rank else draw.choice(_RESUMED_SIZES)
        # A job that has left its last pass in the middle trains on when it is started again.
        ends_passes = DEFAULTS["loop"] in script.parts
        can_be_again = way == RESTARTED and ends_passes
        is_again = can_be_again and random.Random(f"again {seed}").random() < 0.5
        scenario = replace(scenario, resumed_size=resumed_size, is_started_again=is_again)
    return replace(scenario, later=tuple(_later_deaths(scenario, draw, deaths - 1)))


# A further death costs a sixth of a further run.
_DEATHS = {RECOVERED: [1, 2, 3], REPLACED: [1, 6, 12, 18], RESUMED: [1, 2, 3], RESTARTED: [1, 2]}
# A process without a launcher waits 30 s for the checkpoint folder of a job (decision 33).
_RESUMED_SIZES = [1, *[2, 3] * 6]


def _later_deaths(scenario: Scenario, draw: random.Random, number: int) -> Iterator[Death]:
    """Half of them in the recovery from the one before, half at any line of the next world. The
    victims are other workers or replacements; of replicas, those that joined last. One worker of
    the first world survives: it has the state before all others receive it."""
    living = [rank for rank in range(scenario.size) if rank != scenario.rank]
    if scenario.way == REPLACED:
        living.remove(draw.choice(living))
    most_lines = 2.2 if number < 5 else 1.7  # in decimal digits; that of a step is about 1
    for world in range(2, 2 + number):
        if scenario.resumed_size:
            living = list(range(scenario.size_of(world - 1)))
        if scenario.way == REPLACED and scenario.script.sharding:
            living = [2 * world, 2 * world + 1]
        elif scenario.way == REPLACED:
            living.append(scenario.size + world - 2)
        rank = draw.choice(living)
        living.remove(rank)
        event, counted = int(10 ** draw.uniform(0, 3.5)), CALLS  # a recovery: a few thousand calls
        if draw.random() < 0.5:
            event, counted = int(10 ** draw.uniform(0, most_lines)), LINES
        # A replacement counts from its start: if it does not join, no world has this number.
        since = 1 if scenario.resumed_size else 2 if rank >= scenario.size else world
        yield Death(rank=rank, event=event, counted=counted, world=since)


@dataclass
class Runner:
    """Runs scenarios in one small world. Keeps what fails in ``folder``."""

    world: SmallWorld
    folder: Path
    limit_s: float = LIMIT_S
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _references: dict[tuple[str, int], RunOutcome] = field(default_factory=dict)

    def run(self, scenario: Scenario) -> Verdict:
        """Train alone and as in the scenario, and compare."""
        folder = self.folder / f"{scenario.seed}-{next(self._numbers)}"
        folder.mkdir(parents=True)
        path = folder / "script.py"
        path.write_text(scenario.script.text(_note(scenario)))
        alone = self._reference(scenario, path, 1)
        if not alone.survivors or alone.problem:
            return self._verdict(scenario, alone, path, *_failure(alone, "alone: "))
        scenario = drawn_place(scenario, alone, path)
        path.write_text(scenario.script.text(_note(scenario)))
        (folder / "scenario.json").write_text(json.dumps(to_json(scenario), indent=1))
        reference = alone
        if scenario.script.draws_by_rank:
            reference = self._reference(scenario, path, scenario.size)
            if len(reference.survivors) != scenario.size:
                kind, what = _failure(reference, "undisturbed: ")
                return self._verdict(scenario, reference, path, kind, what)
        outcome = self._disturbed(scenario, path, folder)
        kind, what = judge(scenario, outcome, reference)
        verdict = self._verdict(scenario, outcome, path, kind, what)
        if not verdict.failed:
            shutil.rmtree(folder)
        return verdict

    def _reference(self, scenario: Scenario, path: Path, size: int) -> RunOutcome:
        """The undisturbed run, which the next seeds may share."""
        key = scenario.script.text(""), size
        if key not in self._references:
            if len(self._references) > 2 * SEEDS_OF_A_SCRIPT:
                self._references.clear()
            folder = path.parent / ("alone" if size == 1 else "undisturbed")
            self._references[key] = self._train(scenario, path, folder, size)
        return self._references[key]

    def _disturbed(self, scenario: Scenario, path: Path, folder: Path) -> RunOutcome:
        on_death = {RESUMED: STOP, RESTARTED: WAIT}.get(scenario.way, RECOVER)
        deaths = [death for death in (_death(scenario, path), *scenario.later) if death is not None]
        if on_death == RECOVER:
            return self._train(scenario, path, folder / "disturbed", scenario.size, deaths=deaths)
        died_at: list[str] = []

        def start(attempt: int) -> RunOutcome:
            return self._train(
                scenario,
                path,
                folder / ("disturbed" if attempt == 0 else f"resumed-{attempt}"),
                scenario.size_of(attempt),
                deaths=deaths[attempt : attempt + 1],
                on_death=on_death,
                checkpoints="disturbed",
            )

        for attempt in itertools.count():
            outcome = start(attempt)
            died_at += [outcome.died_at] if outcome.died_at else []
            # A worker may fail because of the death before the host knows of it.
            is_known = not outcome.problem or outcome.problem.endswith("has failed")
            # Where a fault was handled in process, the job has ended in spite of a death.
            has_ended = len(outcome.survivors) == scenario.size_of(attempt)
            if not outcome.died_at or not is_known or has_ended:
                break
        deaths = []
        if scenario.is_started_again and has_ended and not outcome.problem:
            outcome = start(attempt + 1)
        return replace(outcome, died_at="; ".join(died_at))

    def _train(
        self,
        scenario: Scenario,
        path: Path,
        folder: Path,
        size: int,
        *,
        deaths: Sequence[Death] = (),
        on_death: str = RECOVER,
        checkpoints: str = "",
    ) -> RunOutcome:
        sharding = scenario.script.sharding
        per_node = 2 if sharding in (REPLICAS, MESH) and size > 1 else 1
        memory = folder.parent / f"memory-of-{folder.name}"
        saved = folder.parent / f"checkpoints-of-{checkpoints or folder.name}"
        host = MemoryHost(memory) if sharding else None
        try:
            return self.world.run(
                path,
                folder,
                size=size,
                per_node=per_node,
                arguments=[str(saved), str(memory), str(per_node)],
                later_deaths=deaths,
                is_replaced=scenario.way == REPLACED,
                is_counted=size == 1,
                on_death=on_death,
                limit_s=self.limit_s * (1 + len(deaths) / _DEATHS_WITHIN_THE_LIMIT),
            )
        finally:
            if host is not None:
                host.close()

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
    """With the line of the death, if it has none yet: each executed line is equally likely. Early
    in the training, if further deaths follow."""
    if scenario.line or scenario.call or scenario.rank < 0:
        return scenario
    draw = random.Random(f"place of {scenario.seed}")
    worker, deaths = alone.survivors[0], 1 + len(scenario.later)
    if scenario.is_in_call:
        return replace(scenario, call=draw.randint(1, int(0.9 * worker.calls / deaths)))
    lines = path.read_text().splitlines()
    number = draw.choice(sorted(worker.executions))
    text = lines[number - 1].strip()
    before = sum(line.strip() == text for line in lines[: number - 1])
    execution = draw.randint(1, math.ceil(worker.executions[number] / deaths))
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
    # A rank that has joined after the function had returned elsewhere has no result of its own.
    first = max(outcome.survivors, key=lambda worker: len(worker.result))
    others = [worker for worker in outcome.survivors if worker is not first]
    expected = reference.survivors[0]
    for worker in outcome.survivors:
        if worker.steps != expected.steps:
            return SILENT, f"{worker.name} counts {worker.steps} steps instead of {expected.steps}"
    for other in others:
        if scenario.script.has_inner_result and other.result.keys() < first.result.keys():
            continue
        if different := unequal(other.result, first.result):
            return SILENT, f"{other.name} and {first.name} differ: {different}"
    tolerance = FLOAT32_TOLERANCE if scenario.script.is_in_float32 else TOLERANCE
    if different := distant(first.result, expected.result, tolerance):
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


def distant(
    result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> str:
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
        if not distance <= tolerance:
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


def to_json(scenario: Scenario) -> dict[str, Any]:
    """What :func:`from_json` reads: parts by their names."""
    script = {**vars(scenario.script), "parts": list(scenario.script.labels)}
    return {**vars(scenario), "script": script, "later": [asdict(d) for d in scenario.later]}


def from_json(written: dict[str, Any]) -> Scenario:
    """A scenario that was kept, at any later state of the generator that has its parts."""
    parts = tuple(BY_LABEL[label] for label in written["script"]["parts"])
    script = Script(**{**written["script"], "parts": parts})
    later = tuple(Death(**death) for death in written["later"])
    return Scenario(**{**written, "script": script, "later": later})


def plain(scenario: Scenario) -> Scenario:
    """The same without a death."""
    return replace(scenario, rank=-1, line="", call=0, later=())
