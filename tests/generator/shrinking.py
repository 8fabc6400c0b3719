"""Shrinks a failing scenario: parts are dropped one by one while it fails alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scenarios import Runner, Scenario, Verdict, plain


def shrunk(runner: Runner, failing: Verdict) -> Verdict:
    """The verdict on the smallest scenario that has the same kind of failure."""
    while True:
        for candidate in smaller(failing.scenario):
            verdict = runner.run(candidate)
            if verdict.kind == failing.kind:
                failing = verdict
                break
        else:
            return failing


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """The scenarios with one part, death or rank less."""
    for number in reversed(range(len(scenario.later))):
        yield replace(scenario, later=scenario.later[:number])
    if scenario.rank >= 0:
        yield plain(scenario)
    for script in scenario.script.smaller():
        yield replace(scenario, script=script)
    if scenario.size > 2 and scenario.rank < 2 and not scenario.script.sharding:
        yield replace(scenario, size=2)
