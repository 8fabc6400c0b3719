"""The failure timeline: one page about a failed job, for its last error, its journal and a file.

Pure: created only from the record of the job's end, so that every node shows the same page.
"""

from __future__ import annotations

import time
from collections import Counter

from elastic.errors import BudgetSpent
from elastic.failures.verdict import is_consequence
from elastic.membership.failure_budget import has_no_state
from elastic.membership.records import BreakageRecord, Done, FailureRecord, Keys
from elastic.tracebacks import exception_line, innermost_place

_LINE = 160  # characters of an error
_MAX_FAILURES = 4  # of one world: the first to fail are the most informative
_FREQUENT = 3  # breakages that began on one node, to name it


def is_wanted(done: Done) -> bool:
    """Whether there is more to report than the reason of the end."""
    return done.exit_code == 70 or len(done.breakages) > 1


def render(done: Done, keys: Keys) -> str:
    """The page. ``keys``: of the job."""
    breakages = done.breakages
    lines = [
        f"Failure timeline of {keys.root}",
        "",
        f"ended    {_utc(done.time_s)}, generation {done.generation}, "
        f"step {_known(done.final_step)}, exit code {done.exit_code}",
        f"because  {_first_line(done.reason)}",
        "",
        f"Failures (the last {len(breakages)}; times in UTC)"
        if breakages
        else "No failure is recorded.",
    ]
    for breakage in breakages:
        lines += _entry(breakage)
    lines += ["", "What to do next", *(f"- {advice}" for advice in _advice(done, keys))]
    return "\n".join(lines)


def _entry(breakage: BreakageRecord) -> list[str]:
    progress = "" if breakage.steps is None else f", {breakage.steps} steps since the previous one"
    lines = [
        f"{_utc(breakage.time_s)}  generation {breakage.generation}, "
        f"step {_known(_step(breakage))}: lived {breakage.lived_s:.0f} s{progress}",
        *(f"    {name}: lost" for name in breakage.lost),
        *(f"    {name}: left" for name in breakage.left),
        *(f"    {failure.node}: {_error(failure)}" for failure in _shown(breakage)),
    ]
    if (more := len(breakage.failures) - _MAX_FAILURES) > 0:
        lines.append(f"    and {more} other nodes")
    verdict = breakage.verdict
    if breakage.churned:
        verdict = f"churn: repeated departure of {', '.join(breakage.churned)}"
    if not breakage.counts:
        verdict = f"{verdict}; not counted" if verdict else "not counted"
    lines.append(f"    verdict: {verdict or 'counted'}")
    if breakage.response:
        lines.append(f"    action: {breakage.response}")
    return lines


def _shown(breakage: BreakageRecord) -> list[FailureRecord]:
    """Origins before consequences, each in the order in which they were reported."""
    ranked = sorted(breakage.failures, key=lambda f: is_consequence(f.text))
    return ranked[:_MAX_FAILURES]


def _step(breakage: BreakageRecord) -> int | None:
    exact = (f.step for f in breakage.failures if f.step is not None)
    return next(exact, breakage.step)


def _error(failure: FailureRecord) -> str:
    text = exception_line(failure.text or "") or f"exit code {failure.exit_code}"
    place = innermost_place(failure.text or "")
    return f"{text[:_LINE]} ({place})" if place else text[:_LINE]


def _advice(done: Done, keys: Keys) -> list[str]:
    breakages = done.breakages
    counted = [b for b in breakages if b.counts]
    failures = [f for b in counted for f in b.failures]
    is_script_error = done.exit_code != BudgetSpent.exit_code  # the same on every node
    advice: list[str] = []
    if any(has_no_state(failure) for failure in failures):
        advice += _without_checkpoint(counted)
    elif hint := done.reason.partition("\n")[2].strip():
        advice.append(hint)
    elif is_script_error:
        step = _step(counted[-1]) if counted else None
        checkpoint = f" from the last checkpoint before step {step}" if step is not None else ""
        advice.append(f"the script itself fails: reproduce it on one node{checkpoint}, and fix it")
    if nodes := sorted({f.node for f in failures if f.is_oom_kill}):
        advice.append(
            f"give {', '.join(nodes)} more memory, or use fewer data workers or a smaller batch: "
            "the kernel ended workers there because the limit was reached"
        )
    if nodes := sorted({name for b in counted for name in b.churned}):
        advice.append(
            f"find out why {', '.join(nodes)} departed repeatedly: the agent's log there, the "
            "machine's, and the scheduler's events (preemption, eviction, a drained node)"
        )
    first = Counter(_shown(b)[0].node for b in counted if b.failures)
    most = first.most_common(1)[0] if len(first) > 1 and not is_script_error else ("", 0)
    if most[1] >= _FREQUENT:
        advice.append(
            f"{most[1]} of {len(counted)} failures began on {most[0]}: run `elastic doctor` on it, "
            "or exclude it"
        )
    if failures and all(is_consequence(f.text) for f in failures):
        advice.append(
            "workers reported only that a peer was gone: check the network between the nodes "
            "with `elastic doctor`"
        )
    if not advice:
        advice.append("read the logs of these nodes at these times, and fix the errors")
    advice.append(f"then {keys.how_to_continue}")
    return advice


def _without_checkpoint(counted: list[BreakageRecord]) -> list[str]:
    """The missing checkpoint is a consequence, so the advice names the first failure."""
    advice = [
        "the job had no checkpoint to resume from: give elastic.join(checkpoints=…) a folder that "
        "all nodes share"
    ]
    for breakage in counted:
        first = next((f for f in _shown(breakage) if not has_no_state(f)), None)
        if first is not None:
            advice.append(
                f"fix the first failure of generation {breakage.generation}, at step "
                f"{_known(_step(breakage))}: {first.node}: {_error(first)}"
            )
            break
    return advice


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][: 4 * _LINE]


def _known(step: int | None) -> str:
    return "not known" if step is None else str(step)


def _utc(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(time_s))
