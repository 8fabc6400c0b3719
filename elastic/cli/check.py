"""``elastic check``: run a script alone and with deaths at random lines, and compare the results.

Its workers are forked from a warm process under simulated agents
(:mod:`elastic.testing.small_world`), on the CPU. Nothing is compared with stored results: the
script's own undisturbed run is the reference.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.child_interpreters import module_command
from elastic.cli.arguments import CommandParser, add_output, at_least
from elastic.errors import SYSTEM_CLOCK, ConfigError
from elastic.telemetry.log import duration

if TYPE_CHECKING:
    from elastic.testing.small_world.comparison import Difference, Record, Rounding, Variable
    from elastic.testing.small_world.world import Death, RunOutcome, SmallWorld

EXACT, NOT_EXACT = 0, 1
_STEPS, _DEATHS, _SIZE, _TIMEOUT_S = 32, 6, 3, 300.0
_LEAST_LIMIT_S, _LIMIT_FACTOR = 60.0, 10.0  # of a run, from the time that it takes alone
_ATTEMPTS = 3  # to draw an event that happens, too, in the run that is to be disturbed
_LOG_TAIL = 1500  # characters of the log of a run that has failed
_CODE_WIDTH = 50  # of a line of the script in a table
_MAX_NAMED = 3  # differences, or variables, in one line


# ----------------------------------------------------------------------------
# The result of a run, and of all of them.


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """One run of the script, as a line of the table."""

    name: str
    verdict: str  # ok, depends, differs, refused or failed
    message: str
    seconds: float
    line: int = 0  # of the script, where a worker has died, or where the error was raised
    rank: int | None = None  # that has died
    is_replaced: bool | None = None
    first_step: int | None = None  # the boundary at which a difference begins
    advice: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        return self.verdict in ("ok", "depends")


@dataclass(kw_only=True)
class CheckReport:
    """All runs of a script."""

    script: str
    size: int
    steps: int
    seed: int
    runs: list[CheckedRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return all(run.is_exact for run in self.runs)

    def sentence(self) -> str:
        """The verdict."""
        wrong = [run for run in self.runs if not run.is_exact]
        if not wrong:
            return f"exact: {len(self.runs)} runs of {Path(self.script).name}"
        return f"not exact: {len(wrong)} of {len(self.runs)} runs of {Path(self.script).name}"


# ----------------------------------------------------------------------------
# The runs.


class Check:
    """The runs of one script."""

    def __init__(self, args: argparse.Namespace, world: SmallWorld, folder: Path) -> None:
        from elastic.testing.small_world import comparison

        self._script = Path(args.script).resolve()
        self._sources = comparison.Sources(lambda file: Path(file).read_text())
        self._arguments = list(args.arguments)
        self._size, self._deaths = args.size, args.deaths
        self._steps, self._seed = args.steps, args.seed
        self._world, self._folder = world, folder
        self._limit_s = args.timeout  # of a run; known better after the first
        self._draw = random.Random(args.seed)
        self._in_retry: bool | None = None
        self._undisturbed_s = 0.0
        self._own_of_ranks: frozenset[str] = frozenset()
        self.report = CheckReport(
            script=str(args.script), size=args.size, steps=args.steps, seed=args.seed
        )

    def run(self) -> CheckReport:
        """All runs, until one without a fault fails."""
        from elastic.testing.small_world import comparison

        alone = self._alone()
        if alone is None:
            return self.report
        undisturbed = self._undisturbed()
        if undisturbed is None:
            return self.report
        record, outcome = undisturbed
        rounding = self._rounding(record)
        if noise := rounding.irreproducible():
            self._add(
                "the same again",
                "differs",
                f"two undisturbed runs; {_begins(noise)}",
                self._undisturbed_s,
                first_step=noise[0].step,
                advice=(
                    "seed what the script draws, and compute nothing from the time, or from files "
                    "that an earlier run has left",
                ),
            )
            return self.report
        unchanging = self._compare_alone(record, alone, rounding)
        self._own_of_ranks = comparison.names_by_rank(record, rounding)
        self._note_facts(record)
        recovers = alone.facts["in_retry"] or alone.facts["own_loop"]
        if recovers:
            self._kill(outcome, record, rounding, unchanging)
        for number in range(1 if recovers else (self._deaths + 1) // 2):  # of two runs each
            self._restart(number, outcome, record, rounding)
        return self.report

    # -- runs without a fault ------------------------------------------------------------------

    def _alone(self) -> Record | None:
        from elastic.testing.small_world.comparison import record_of

        began_s = SYSTEM_CLOCK.monotonic()
        outcome, folder = self._start("alone", size=1)
        has_joined = any(w.record.get("facts", {}).get("joined") for w in outcome.workers)
        if outcome.survivors and not has_joined:
            raise ConfigError(_without_elastic(self._script))
        if not outcome.survivors:
            if any("replica" in worker.error for worker in outcome.workers):
                raise ConfigError(
                    f"{self._script.name} calls elastic.join(mesh=…): elastic check has replicas "
                    "of one rank only",
                    hint="if the script takes the size of its mesh as an argument, give it 1; "
                    "with more, start `elastic run --embedded-etcd --nodes-local=2 --nnodes=1:2 "
                    f"--nproc-per-node=N {self._script.name} …`, N ranks being a replica, and kill "
                    "a worker",
                )
            self._add_failure("alone", outcome, began_s)
            return None
        record = record_of(outcome, folder)
        self._in_retry = bool(record.facts["in_retry"]) and not record.facts["own_loop"]
        took_s = float(record.facts["seconds"])  # without the start of the host
        self._add("alone", "ok", _amounts(record, None), took_s)
        self._limit_s = min(self._limit_s, _LEAST_LIMIT_S + _LIMIT_FACTOR * self._size * took_s)
        if not record.steps:
            raise ConfigError(
                f"{self._script.name} has committed no step",
                hint="elastic check needs a script that trains: run.epochs, run.steps, or "
                "run.begin and run.commit",
            )
        say(f"the same with {self._size} ranks, which measures how long the other runs take")
        return record

    def _undisturbed(self) -> tuple[Record, RunOutcome] | None:
        from elastic.testing.small_world.comparison import record_of

        began_s = SYSTEM_CLOCK.monotonic()
        outcome, folder = self._start("undisturbed", size=self._size)
        if outcome.problem or len(outcome.survivors) != self._size:
            self._add_failure(f"{self._size} ranks", outcome, began_s)
            return None
        self._undisturbed_s = SYSTEM_CLOCK.monotonic() - began_s
        record = record_of(outcome, folder)
        # One without a fault, each death, and a restart, which takes two.
        say(announced(self._deaths + 3, record.steps, self._undisturbed_s))
        return record, outcome

    def _rounding(self, record: Record) -> Rounding:
        from elastic.testing.small_world.comparison import Rounding, record_of

        outcome, folder = self._start("rounding", size=self._size, is_noisy=True)
        is_usable = not outcome.problem and len(outcome.survivors) == self._size
        return Rounding(record, record_of(outcome, folder) if is_usable else None)

    def _compare_alone(self, record: Record, alone: Record, rounding: Rounding) -> frozenset[str]:
        """The names of what does not depend on the number of ranks."""
        from elastic.testing.small_world import comparison

        name = f"{self._size} ranks"
        took_s = self._undisturbed_s
        differences = comparison.differing_state(record, alone, rounding)
        same = comparison.names_of_state(record) if not differences else frozenset()
        wrong = self._wrong_amounts(record, alone)
        if not differences and not wrong:
            values = comparison.differing_values(record, alone, rounding, only=record.means)
            message = f"as alone: same weights, {_amounts(record, alone)}"
            if values:
                message += f"; but {_listed(values)}"
            self._add(name, "ok", message, took_s)
            return same
        reasons = _reasons(record)
        if wrong or not reasons:
            text = "; ".join([*wrong, *([_begins(differences)] if differences else [])])
            advice = (
                "without a fault, the result depends on the number of ranks: a loss is to be the "
                "mean over the batch (docs/how-to/adopt.md)",
            )
            step = differences[0].step if differences else None
            self._add(name, "differs", text, took_s, first_step=step, advice=advice)
        else:
            text = f"{' and '.join(reasons)}; {_begins(differences)}"
            self._add(name, "depends", text, took_s, first_step=differences[0].step)
            self.report.notes.append(
                "weights depend on the number of ranks, with plain DDP, too: after a death without "
                "a replacement they are not compared"
            )
        return same

    def _note_facts(self, record: Record) -> None:
        self.report.notes += [f"warning of the script's job: {text}" for text in record.warnings]
        if record.written:
            shown = ", ".join(os.path.relpath(path) for path in record.written[:_MAX_NAMED])
            more = len(record.written) - _MAX_NAMED
            self.report.notes.append(
                f"the script itself wrote {shown}{f' and {more} more' if more > 0 else ''}; "
                "elastic check redirects checkpoints and run.log only"
            )
        if self._own_of_ranks:
            self.report.notes.append(
                f"{len(self._own_of_ranks)} buffers differ by rank and were not compared"
            )
        if not record.facts["saves"]:
            self.report.notes.append("the script saves no checkpoints: no restart was checked")

    # -- runs with a death ---------------------------------------------------------------------

    def _kill(
        self, outcome: RunOutcome, record: Record, rounding: Rounding, unchanging: frozenset[str]
    ) -> None:
        for number in range(self._deaths):
            # Where results depend on the number of ranks, only a replaced rank leaves them as is.
            is_replaced = number % 2 == 0 or (not unchanging and number < self._deaths - 1)
            for attempt in range(_ATTEMPTS):
                death = self._death(outcome, number, part=(number, self._deaths))
                began_s = SYSTEM_CLOCK.monotonic()
                killed, folder = self._start(
                    f"death-{number}-{attempt}",
                    size=self._size,
                    death=death,
                    is_replaced=is_replaced,
                )
                if killed.died_at:
                    break
            else:
                self.report.notes.append(f"{self._where(death, killed)}: not reached in this run")
                continue
            took_s = SYSTEM_CLOCK.monotonic() - began_s
            where = self._where(death, killed)
            name = f"{where}, {'replaced' if is_replaced else 'not replaced'}"
            options: dict[str, Any] = {"line": death.line, "rank": death.rank}
            options["is_replaced"] = is_replaced
            expected = self._size if is_replaced else self._size - 1
            if killed.problem or len(killed.survivors) != expected:
                self._add_failure(name, killed, began_s, **options)
                continue
            only = None if is_replaced else unchanging
            self._compare(name, killed, folder, record, rounding, only, took_s, **options)

    def _death(self, outcome: RunOutcome, number: int, *, part: tuple[int, int]) -> Death:
        """``part``: of how many parts of the training, from 0."""
        from elastic.testing.small_world.world import CALLS, Death

        rank = number % self._size
        worker = outcome.workers[rank]
        places = {("", line): count for line, count in worker.executions.items()}
        for place, count in worker.elsewhere.items():
            file, _, line = place.rpartition(":")
            places[file, int(line)] = count
        if not places:  # all of training is in an installed package
            event = self._event(max(1, int(worker.calls * 0.9)), part)
            return Death(rank=rank, event=event, counted=CALLS)
        # Most executions are those of the hottest loop: code between epochs is to be hit, too.
        weights = [min(places[place], self._steps) ** 0.5 for place in sorted(places)]
        file, number = self._draw.choices(sorted(places), weights)[0]
        event = self._event(places[file, number], part)
        return Death(rank=rank, file=file, line=number, event=event)

    def _event(self, count: int, part: tuple[int, int]) -> int:
        """One of ``count`` events in a part of the training: what the script changes once, and
        forgets, shows only in deaths after it."""
        first, parts = part
        return 1 + int(count * (first + self._draw.random()) / parts)

    def _where(self, death: Death, outcome: RunOutcome) -> str:
        if death.line:
            text = _shortened(self._sources.line(death.file or str(self._script), death.line))
            place = f"line {death.line}"
            if death.file:
                place = f"{os.path.relpath(death.file, self._script.parent)}, {place}"
            committed = outcome.died_at.rpartition(", ")[2].removesuffix(" steps committed")
            return f"death of rank {death.rank} in {place} ({text}), step {committed}"
        return f"death of rank {death.rank} in {outcome.died_at}"

    def _compare(
        self,
        name: str,
        outcome: RunOutcome,
        folder: Path,
        wanted: Record,
        rounding: Rounding,
        only: frozenset[str] | None,
        took_s: float,
        *,
        before: Mapping[int, Any] | None = None,
        **options: Any,
    ) -> None:
        """Add the comparison with the undisturbed run. ``only``: the names of what a world of
        another size leaves unchanged; None: all."""
        from elastic.testing.ledger import read_ledger
        from elastic.testing.small_world import comparison

        got = comparison.record_of(outcome, folder)
        if before is not None:
            starts = [start.step for start in read_ledger(folder / "ledger").starts]
            got = comparison.continued(before, got, min(starts, default=0))
        wrong = self._wrong_amounts(got, wanted)
        shared = comparison.names_of_state(wanted) - self._own_of_ranks
        shared = shared if only is None else shared & only
        differences = comparison.differing_state(got, wanted, rounding, only=shared)
        is_same_size = only is None
        # Rank 0's own values are those of another rank after its death.
        logged = None if is_same_size and options["rank"] else wanted.means
        if before is None and not is_same_size and not only:
            logged = frozenset()
        values = comparison.differing_values(got, wanted, rounding, only=logged)
        variables = comparison.differing_variables(got, wanted, rounding.noisy, self._sources)
        is_comparable = is_same_size and before is None  # variables hold what a rank has, too
        lost = [v for v in variables if v.has_tensors and is_comparable]
        if differences or wrong or values or lost:
            parts = [*wrong]
            if differences:
                parts.append(_begins(differences))
            elif values:
                parts.append(f"{_listed(values)} in step {values[0].step}")
            if lost and not differences:
                parts.append(f"same weights, but not {', '.join(v.name for v in lost)}")
            step = differences[0].step if differences else None
            advice = (*self._advice(differences, variables, lost), *_new_warnings(got, wanted))
            self._add(
                name, "differs", "; ".join(parts), took_s, first_step=step, advice=advice, **options
            )
            return
        compared = "same weights" if only is None or only else "weights not compared"
        self._add(name, "ok", f"{compared}, {_amounts(got, wanted)}", took_s, **options)
        known = {_without_numbers(note) for note in self.report.notes}  # each run has its own step
        for text in _new_warnings(got, wanted):
            if _without_numbers(text) not in known:
                self.report.notes.append(text)
        for variable in variables if is_comparable else ():
            note = (
                "a recovery changes the variable "
                f"{variable.name} (line {variable.line}), which no result of training shows; "
                "if it matters, keep it in run.state"
            )
            if note not in self.report.notes:
                self.report.notes.append(note)

    def _wrong_amounts(self, got: Record, wanted: Record) -> list[str]:
        from elastic.testing.small_world import comparison

        wrong = []
        if got.steps != wanted.steps:
            wrong.append(f"{got.steps} instead of {wanted.steps} steps")
        total, more = wanted.total_samples, comparison.additional_samples(got, wanted)
        missing = total - comparison.matching_samples(got, wanted)
        if missing or more:
            wrong.append(f"{missing} of {total} samples missing in their steps, {more} additional")
        return wrong

    def _advice(
        self,
        differences: Sequence[Difference],
        variables: Sequence[Variable],
        lost: Sequence[Variable],
    ) -> Iterator[str]:
        from elastic.testing.small_world.comparison import line_that_sets

        keys = [d.name.rpartition(".")[2] for d in differences if ".param_groups." in d.name]
        for key in dict.fromkeys(keys):
            if line := line_that_sets(self._script.read_text(), key):
                yield f"line {line} sets {key}: {self._line(line)}"
        for variable in variables[:_MAX_NAMED]:
            yield f"changed by the recovery: {variable.describe(self._sources)}"
        for variable in (*lost, *variables)[:1]:
            name = variable.name.rpartition(".")[2]
            if variable.is_generator:
                yield "draw from the default generators, which have a seed for each step and rank"
            elif variable.has_tensors:
                yield f"make it part of the job: run.track({name}=…), or a buffer of a module"
            else:
                yield f'keep it in run.state: run.state["{name}"], the same on all ranks'

    # -- a restart -----------------------------------------------------------------------------

    def _restart(
        self, number: int, outcome: RunOutcome, record: Record, rounding: Rounding
    ) -> None:
        """End all ranks at once, or by one rank's death without run.retry, and start them again."""
        from elastic.testing.ledger import read_ledger
        from elastic.testing.small_world.comparison import samples_of
        from elastic.testing.small_world.world import STOP, WAIT

        if not record.facts["saves"]:
            return
        began_s = SYSTEM_CLOCK.monotonic()
        rank = self._draw.randrange(self._size)
        death = self._death(outcome, rank, part=(1, 2))  # with something to restore
        how = STOP if self._in_retry or record.facts["own_loop"] else WAIT
        ended, folder = self._start(f"ended-{number}", size=self._size, death=death, on_death=how)
        if not ended.died_at:
            return
        before = samples_of(read_ledger(folder / "ledger"))
        again, second = self._start(
            f"again-{number}", size=self._size, checkpoints=folder / "checkpoints"
        )
        name = f"{self._where(death, ended)}, all ranks restarted"
        if how == STOP:
            name = name.replace("death of rank", "all ranks killed, rank")
        options: dict[str, Any] = {"line": death.line, "rank": death.rank}
        if again.problem or len(again.survivors) != self._size:
            self._add_failure(name, again, began_s, **options)
            return
        took_s = SYSTEM_CLOCK.monotonic() - began_s
        self._compare(name, again, second, record, rounding, None, took_s, before=before, **options)

    def _line(self, number: int) -> str:
        return self._sources.line(str(self._script), number)

    # -- parts ---------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        *,
        size: int,
        is_noisy: bool = False,
        checkpoints: Path | None = None,
        **options: Any,
    ) -> tuple[RunOutcome, Path]:
        folder = self._folder / name
        if sys.stderr.isatty():
            say(f"running: {name}")
        environment = {
            "ELASTIC_MAX_NODES": str(self._size),
            "ELASTIC_LEDGER": str(folder / "ledger"),
            "ELASTIC_TENSORBOARD": "off",
            "ELASTIC_JOURNAL": str(folder / "journal"),
        }
        if "ELASTIC_CHECKPOINTS" in os.environ:
            environment["ELASTIC_CHECKPOINTS"] = str(folder / "checkpoints")
        record = {
            "steps": self._steps,
            "epoch_steps": max(1, self._steps // 3),
            "save_every": max(1, self._steps // 8),
            "checkpoints": str(checkpoints or folder / "checkpoints"),
            "is_in_retry": self._in_retry,
            "is_noisy": is_noisy,
        }
        outcome = self._world.run(
            self._script,
            folder,
            size=size,
            arguments=self._arguments,
            environment=environment,
            record=record,
            limit_s=self._limit_s,
            **options,
        )
        return outcome, folder

    def _add(self, name: str, verdict: str, message: str, seconds: float, **options: Any) -> None:
        self.report.runs.append(
            CheckedRun(name=name, verdict=verdict, message=message, seconds=seconds, **options)
        )

    def _add_failure(self, name: str, outcome: RunOutcome, began_s: float, **options: Any) -> None:
        failed = [w for w in outcome.workers if w.error]
        own = [w for w in failed if w.error.startswith(_REFUSALS)] or failed
        own.sort(key=lambda worker: _OF_ANOTHER in worker.error)
        verdict = "refused" if own and own[0].error.startswith(_REFUSALS) else "failed"
        advice: list[str] = []
        if own:
            kind, _, rest = own[0].error.partition(": ")
            text, _, hint = rest.partition("\n")
            message = f"{kind}: {text}"
            advice += [hint.strip()] if hint.strip() else []
            line = own[0].line
            if line:
                advice.insert(0, f"line {line}: {self._line(line)}")
                options.setdefault("line", line)
        else:
            message = outcome.problem or "a worker ended without an error"
            advice += [w.log[-_LOG_TAIL:] for w in outcome.workers if w.exit_code != 0][:1]
        took_s = SYSTEM_CLOCK.monotonic() - began_s
        self._add(name, verdict, message, took_s, advice=tuple(advice), **options)


def announced(runs: int, steps: int, undisturbed_s: float) -> str:
    """How long the remaining runs take, from one without a fault. One with a death takes longer,
    and another one if its death did not happen.

    >>> announced(9, 32, 20.0)
    '9 more runs of 32 steps, about 3 min 0 s to 6 min 0 s'
    """
    least_s = runs * undisturbed_s
    return (
        f"{runs} more runs of {steps} steps, about {duration(least_s)} to {duration(2 * least_s)}"
    )


_REFUSALS = ("TrainingError", "ConfigError", "CheckpointRequired", "StateError")
_OF_ANOTHER = "this rank ends because"  # of another one's error


def _shortened(code: str) -> str:
    return code if len(code) <= _CODE_WIDTH else f"{code[: _CODE_WIDTH - 1]}…"


def _amounts(got: Record, wanted: Record | None) -> str:
    if wanted is None:
        samples = f", {got.total_samples} samples" if got.total_samples else ""
        return f"{got.steps} steps{samples}"
    samples = ""
    if wanted.total_samples:
        samples = f", {got.total_samples} of {wanted.total_samples} samples"
    return f"{got.steps} of {wanted.steps} steps{samples}"


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def _new_warnings(got: Record, wanted: Record) -> list[str]:
    return [f"warning: {text}" for text in got.warnings if text not in wanted.warnings]


def _begins(differences: Sequence[Difference]) -> str:
    more = f" and {len(differences) - _MAX_NAMED} more" if len(differences) > _MAX_NAMED else ""
    return f"after step {differences[0].step}: {_listed(differences)}{more}"


def _listed(differences: Sequence[Difference]) -> str:
    return ", ".join(each.describe() for each in differences[:_MAX_NAMED])


def _reasons(record: Record) -> list[str]:
    """Why results may depend on the number of ranks, with plain DDP, too."""
    facts = record.facts
    return [
        text
        for text, holds in (
            ("it draws random numbers, which differ by rank", facts["draws"]),
            ("BatchNorm's statistics are those of a rank's share", facts["batch_norm"]),
        )
        if holds
    ]


# ----------------------------------------------------------------------------
# The command line.


def main(argv: Sequence[str]) -> int:
    """Run ``elastic check ARGV``; returns 0 if all runs are exact, else 1."""
    args = parser().parse_args(argv)
    script = Path(args.script)
    if not script.is_file():
        raise ConfigError(
            f"{args.script} is not a file", hint="elastic check train.py [its arguments]"
        )
    if not imports_elastic(script):
        raise ConfigError(_without_elastic(script))
    say(f"{args.deaths + 5} runs of up to {args.steps} steps with {args.size} ranks on the CPU")
    with _folder(args.logs) as folder:
        report = _checked(args, folder)
    if args.output == "json":
        print(json.dumps(as_json(report), indent=1))
    else:
        _print(report)
    return EXACT if report.is_exact else NOT_EXACT


def _checked(args: argparse.Namespace, folder: Path) -> CheckReport:
    def start(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        # Without the current folder, whose modules may have the names of this package's.
        command = module_command("elastic.testing.small_world.host")
        return subprocess.Popen(command, env={**env, "CUDA_VISIBLE_DEVICES": ""}, **options)

    from elastic.testing.small_world.world import SmallWorld

    with SmallWorld(start=start) as world:
        return Check(args, world, folder).run()


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"elastic: {text}", file=sys.stderr, flush=True)


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is not None:
        folder = Path(given).resolve()
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--logs={given} is not empty", hint="name a new folder")
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="elastic-check-") as name:
        yield Path(name)


def imports_elastic(script: Path) -> bool:
    """Whether a script imports this package: itself, or by a module beside it."""
    seen: set[Path] = set()
    waiting = [script.resolve()]
    while waiting:
        path = waiting.pop()
        seen.add(path)
        try:
            tree = ast.parse(path.read_text())
        except SyntaxError as error:
            raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from None
        for name in _imported(tree):
            if name.partition(".")[0] == "elastic":
                return True
            base = script.resolve().parent.joinpath(*name.split("."))
            beside = (base.with_suffix(".py"), base / "__init__.py")
            waiting += [module for module in beside if module.is_file() and module not in seen]
    return False


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _without_elastic(script: Path) -> str:
    return (
        f"{script.name} does not call elastic.join(): unmodified, it is restarted after each death "
        "and loads its own checkpoint, which this command does not check"
    )


def as_json(report: CheckReport) -> dict[str, object]:
    """The document that ``-o json`` prints."""
    return {
        "exact": report.is_exact,
        "script": report.script,
        "size": report.size,
        "steps": report.steps,
        "seed": report.seed,
        "runs": [asdict(run) for run in report.runs],
        "notes": report.notes,
    }


_VERDICTS = {
    "depends": "depends on the number of ranks",
    "differs": "differs",
    "refused": "refused",
    "failed": "failed",
}


def _print(report: CheckReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from elastic.cli.view import table_console

    console = table_console()
    table = Table("run", "result", "s")
    colours = {"ok": "green", "depends": "yellow"}
    for run in report.runs:
        style = colours.get(run.verdict, "bold red")
        shown = run.message if run.verdict == "ok" else f"{_VERDICTS[run.verdict]}: {run.message}"
        lines = [shown, *(f"→ {text}" for text in run.advice)]
        if sys.stdout.isatty():
            cell = Text("\n".join(lines), style=style)
            table.add_row(Text(run.name), cell, f"{run.seconds:.1f}")
        else:  # a sentence in a table would be as wide as the longest one
            print(f"{run.name} ({run.seconds:.1f} s): " + "\n    ".join(lines))
    if table.row_count:
        console.print(table)
    for note in report.notes:
        console.print(f"note: {note}")
    console.print(report.sentence())


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic check``."""
    parser = CommandParser(
        prog="elastic check",
        usage="elastic check [-h] [flags] SCRIPT [ARGUMENTS ...]",
        description="Run a script alone, in a small world on this machine, and with deaths of "
        "ranks at random lines of its training function, on the CPU; then compare weights, state, "
        "steps, samples and logged values. Training ends after --steps steps, and epochs are "
        "shortened to a third of that. Checkpoints and run.log go to a temporary folder.",
        epilog="exit codes: 0 all runs are exact, 1 one differs, is refused or fails, 2 usage",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS")
    parser.add_argument(
        "--steps",
        type=at_least(2),
        default=_STEPS,
        metavar="N",
        help="the number of steps of a run (default: %(default)s)",
    )
    parser.add_argument(
        "--deaths",
        type=at_least(0),
        default=_DEATHS,
        metavar="N",
        help="the number of runs in which a rank dies (default: %(default)s)",
    )
    parser.add_argument(
        "--size",
        type=at_least(2),
        default=_SIZE,
        metavar="N",
        help="the number of ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="determines where ranks die (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=_TIMEOUT_S,
        metavar="S",
        help="how long a run may take (default: %(default)g)",
    )
    parser.add_argument("--logs", metavar="DIR", help="keep the logs of all runs in this folder")
    add_output(parser, "table", "json")
    return parser
