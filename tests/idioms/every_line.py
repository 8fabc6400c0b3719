"""A death in every line of the idioms, one run for each: ``python tests/idioms/every_line.py``.

``make test`` draws one line of each script, ``make soak`` twenty. This command covers all lines
that run within ``run.retry``, each in one of its executions, in a rank that is replaced in half of
the runs. It prints a row for each script, and exits with 1 if a run ended with another result.
Scripts are names of the catalogue, or files that leave a ``result``; all of the catalogue by
default.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from catalogue import Idiom, idioms
from idiom_runs import SIZE, IdiomRuns, assert_as_undisturbed, assert_same

from elastic.testing.small_world.world import Death, SmallWorld


@dataclass(frozen=True, kw_only=True)
class Row:
    """The deaths in the lines of one script."""

    name: str
    lines: int  # with a death in them
    not_reached: tuple[int, ...]  # lines that three workers execute in other numbers than before
    failures: tuple[str, ...]  # each with the death that reproduces it

    def __str__(self) -> str:
        missed = f"; not reached: {list(self.not_reached)}" if self.not_reached else ""
        return f"{self.name:48} {self.lines:4} lines {len(self.failures):3} failures{missed}"


def deaths_of(idiom: Idiom, executions: Sequence[dict[int, int]], seed: int) -> Iterable[Death]:
    """One death in each line of the script, by the executions of each rank."""
    draw = random.Random(f"{idiom.name}/{seed}")
    for line in sorted(set().union(*executions)):
        rank = draw.choice([r for r, counts in enumerate(executions) if line in counts])
        event = draw.randint(1, executions[rank][line])
        yield Death(rank=rank, event=event, line=line)


def run_script(runs: IdiomRuns, idiom: Idiom, seed: int) -> Row:
    """One death in each line. The folders of exact runs are removed."""
    try:
        undisturbed = runs.undisturbed(idiom)
        undisturbed.assert_success(workers=SIZE)
        assert_same(idiom, undisturbed, runs.alone(idiom))
    except AssertionError as error:
        return Row(name=idiom.name, lines=0, not_reached=(), failures=(f"undisturbed: {error}",))
    executions = [worker.executions for worker in undisturbed.workers]
    failures, not_reached, lines = [], [], 0
    for number, death in enumerate(deaths_of(idiom, executions, seed)):
        is_replaced = (number + seed) % 2 == 1
        outcome = runs.with_death(idiom, death, is_replaced=is_replaced)
        if not outcome.died_at and len(outcome.survivors) == SIZE:
            not_reached.append(death.line)
            continue
        lines += 1
        try:
            outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
            assert_same(idiom, outcome, runs.alone(idiom))
            if is_replaced and not idiom.is_compared_alone:
                assert_as_undisturbed(idiom, outcome, undisturbed)
        except AssertionError as error:
            failures.append(f"{death} replaced={is_replaced}: {error}")
    if not failures:
        shutil.rmtree(runs.folder / idiom.name, ignore_errors=True)
    return Row(
        name=idiom.name, lines=lines, not_reached=tuple(not_reached), failures=tuple(failures)
    )


def find(name: str) -> Idiom:
    """An idiom by its name, or any script by its path."""
    known = {idiom.name: idiom for idiom in idioms()}
    if name in known:
        return known[name]
    return Idiom(path=Path(name).resolve(strict=True), title=name, text="", directives={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*")
    parser.add_argument("--seed", type=int, default=0, help="draws executions and ranks")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    options = parser.parse_args()
    chosen = [find(name) for name in options.scripts] or idioms()
    folder, local = Path(tempfile.mkdtemp(prefix="every-line-")), threading.local()
    worlds = [SmallWorld() for _ in range(options.jobs)]
    free = iter(worlds)

    def begin() -> None:
        local.runs = IdiomRuns(next(free), folder)

    with ThreadPoolExecutor(options.jobs, initializer=begin) as pool:
        rows = []
        for row in pool.map(lambda idiom: run_script(local.runs, idiom, options.seed), chosen):
            print(row, *row.failures, sep="\n  ", flush=True)
            rows.append(row)
    for world in worlds:
        world.close()
    failed = sum(len(row.failures) for row in rows)
    print(f"{len(rows)} scripts, {sum(row.lines for row in rows)} deaths, {failed} failures")
    print(f"folders of failures: {folder}" if failed else "all exact")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
