"""How many failures a job may have, and how long a failed node is excluded."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.errors import CheckpointRequired
from elastic.membership.failures import (
    COLLECTIVE_TIMEOUT,
    GROUP_NOT_BUILT,
    is_consequence,
    rule_of,
)
from elastic.membership.records import FailureRecord
from elastic.tracebacks import (
    exception_line,
    exception_of,
    exception_type,
    innermost_place,
    normalize,
)
from elastic.tuning.intervals import (
    COLLECTIVE_TIMEOUT_S,
    FAILURE_WINDOW_S,
    HEALTHY_S,
    QUARANTINE_S,
)

# A node that is quarantined again and again is so for up to this many times quarantine_s.
MAX_DOUBLED = 32
# Losses of a node, and reports against it, within this time are counted together.
FLAP_WINDOW_S = 120.0

# ----------------------------------------------------------------------------
# Identifies the nodes at fault when a group repeatedly cannot be built.
#
# docs/explanation/protocol.md, section 6, "Escalation".
#
# The nodes that arrived at a build report the missing ones. Pure state; for one thread.

IN_A_ROW = 3
# A node whose workers fail for so long before they are in any world, always in the same way, ends.
FAILED_STARTS_S = 60.0


class FailedBuilds:
    """Counts failed builds in a row, for each node that was missing from all of them, and for each
    two nodes of which one missed the other: which of the two reports depends on which of them opens
    the connection, which may differ in each build."""

    def __init__(self) -> None:
        self._streaks: dict[frozenset[str], int] = {}

    def failed(
        self,
        members: Sequence[str],
        reports: Mapping[str, Sequence[str]],
        *,
        has_run: bool = True,
        joining: Collection[str] = (),
    ) -> tuple[str, ...]:
        """A world of ``members`` (in rank order) broke; ``reports`` has the nodes for which each
        reporter waited without success. Without reports, a world that some member has run resets
        all counts. If none has, the reports are late: another member was released first.

        ``joining``: the members that were never connected to the others. Those train without them,
        so that further attempts would only delay them: the first failed build is enough.

        Returns the nodes to be excluded now.
        """
        if not has_run and not any(reports.values()):
            return ()
        lacks = _disconnected(members, reports)
        causes = {node: _causes(node, lacks) for node in _at_fault(members, lacks, reports)}
        self._streaks = {
            cause: self._streaks.get(cause, 0) + 1
            for cause in {cause for of_node in causes.values() for cause in of_node}
        }
        out = {
            node
            for node, of_node in causes.items()
            if max(self._streaks[cause] for cause in of_node) >= IN_A_ROW
        }
        for cause in (cause for node in out for cause in causes[node]):
            self._streaks.pop(cause, None)
        if len(joining) < len(members):
            out.update(node for node in _cover(members, lacks, joining) if node in joining)
        return tuple(node for node in members if node in out)


def _disconnected(
    members: Sequence[str], reports: Mapping[str, Sequence[str]]
) -> dict[str, set[str]]:
    """The members without a connection to each member. Either end may report it, and either may be
    the cause."""
    known = frozenset(members)
    lacks: dict[str, set[str]] = defaultdict(set)
    for reporter, unreachable in reports.items():
        for node in unreachable:
            if node != reporter and node in known and reporter in known:
                lacks[reporter].add(node)
                lacks[node].add(reporter)
    return lacks


def _causes(node: str, lacks: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The node itself, and its connection to the other one if it only lacks that one."""
    alone = [frozenset((node, *lacks[node]))] if len(lacks[node]) == 1 else []
    return [frozenset((node,)), *alone]


def _at_fault(
    members: Sequence[str], lacks: Mapping[str, set[str]], reports: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The nodes that lack a connection to the largest number of others.

    If there are several, those without a report: they never arrived. If all reported (two nodes
    that cannot reach each other), only the most junior one is at fault, so that the others can
    continue.
    """
    most = max(map(len, lacks.values()), default=0)
    worst = [node for node in members if most and len(lacks.get(node, ())) == most]
    silent = [node for node in worst if node not in reports]
    return tuple(silent or worst[-1:])


def _cover(
    members: Sequence[str], lacks: Mapping[str, set[str]], joining: Collection[str]
) -> list[str]:
    """Nodes without which all others are connected, as far as is known: one after the other, the
    one that lacks most of the rest. Of several, a joining node, and of those the most junior one:
    the others train without it."""
    left = {node: set(others) for node, others in lacks.items()}

    def rank(node: str) -> tuple[int, bool, int, str]:
        return -len(left[node]), node not in joining, -place[node], node

    place = {node: i for i, node in enumerate(members)}
    queue = [rank(node) for node in left]
    heapq.heapify(queue)
    chosen: list[str] = []
    while queue:
        *_, node = known = heapq.heappop(queue)
        if (current := rank(node)) != known:  # some of those that it lacks have been chosen
            heapq.heappush(queue, current)
        elif left[node]:
            chosen.append(node)
            for other in left[node]:
                left[other].discard(node)
            left[node] = set()
    return chosen


# ----------------------------------------------------------------------------
# Decides when a job stops, and which nodes to quarantine. Pure: time is passed as an argument.
#
# A job stops for one of five reasons:
#
# - No rank of a world has the job's state, and there is no checkpoint. Every further world would
#   start the same way, even if nodes fail alternately and none of them is at fault.
# - The same error of the *script* occurred at the same step three times, and the job never got
#   past that step. Events in between do not matter, since a restart from a checkpoint always makes
#   steps.
# - The same error broke three worlds in a row without progress. An error that occurs at a later
#   step each time is progress.
# - Worlds keep breaking without a healthy one in between: the budget is spent. Churn uses it up,
#   too: nodes that are lost or leave repeatedly while the job makes no progress.
# - As many worlds ended without a step, over the budget's whole window or longer; of worlds that
#   wait for torch's default time limits, three. Only then do groups of live members that cannot be
#   built count: the network may return, and each attempt takes seconds.
# - The script exited in the same way, without an exception, after the same time, three times in a
#   row, and steps are not known.
#
# A healthy world resets everything else: one that made ``healthy_steps``, or lasted ``healthy_s``
# if steps are not known (restart mode).

_KILLED = (-9, -15)  # SIGKILL, SIGTERM: from outside
_WRONG_USAGE = 2  # argparse's exit code
_HINT = 1000  # characters of a hint of this library
# By how much a rank may be ahead of the reporting one: ranks differ by one step at most.
_STEP_AHEAD = 1
# Worlds that last this much longer than others have not lasted equally long.
_SAME_TIME = 1.1
# The shortest of torch's default time limits, of a collective on NCCL.
_SLOW_S = 600.0
# One or two steps may only be a late report.
_LATE_STEPS = 2


@dataclass(frozen=True)
class Failure:
    """The failure of the workers of one node."""

    node: str  # its name
    text: str | None  # the script's error, if it left one
    exit_code: int | None  # negative: the signal
    step: int | None = None  # steps committed by the worker that failed
    is_oom_kill: bool = False  # the kernel ended it because its memory limit was reached


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """A world that broke, or lost nodes."""

    generation: int
    lived_s: float
    failures: tuple[Failure, ...]
    lost: tuple[str, ...]  # names of members that were lost
    at_s: float  # monotonic
    steps: int | None = None  # since the previous breakage; None: not known
    left: tuple[str, ...] = ()  # names of members that left gracefully
    churned: tuple[str, ...] = ()  # of those lost and left: repeatedly within the window
    counts: bool = True  # False: nodes are missing, which is not the job's fault
    step: int | None = None  # of the job, as known to its leader
    excluded: str = ""  # name of a node whose machine, or network, was at fault
    verdict: str = ""  # on the first failure, for users; without one, what a member reported
    response: str = ""  # the response to it
    attempts: int = 1  # worlds in a row whose groups could not be built, counted as one breakage

    @property
    def is_failure(self) -> bool:
        """Whether it is attributed to the script, rather than to departing nodes or to a
        machine."""
        return self.counts and not self.churned and not self.excluded

    @property
    def is_failed_build(self) -> bool:
        """Whether live members only could not connect to each other: nobody's fault, as far as is
        known."""
        return not (self.counts or self.failures or self.lost or self.left)

    @property
    def is_unbuilt(self) -> bool:
        """Whether its group could not be built, so that it made no step. Workers that have no
        link to their agent fail with torch's errors for that. (In restart mode a member runs its
        world before the group is built.)"""
        texts = [failure.text for failure in self.failures] or [self.verdict]
        return self.is_failed_build or GROUP_NOT_BUILT in map(rule_of, texts)

    @property
    def is_unexplained(self) -> bool:
        """Whether members reported a broken connection, but nobody had failed or was lost."""
        return self.counts and not (self.failures or self.lost or self.left)

    @property
    def began_s(self) -> float:
        """When its world was formed."""
        return self.at_s - self.lived_s


@dataclass(frozen=True, kw_only=True)
class FailureBudget:
    """``budget`` breakages in ``failure_window_s`` are tolerated, one more is not."""

    budget: int = 10
    failure_window_s: float = FAILURE_WINDOW_S
    healthy_s: float = HEALTHY_S
    # In-process steps are never lost: twenty between failures are progress.
    healthy_steps: int = 20
    same_error: int = 3  # worlds in a row, or at one step, that the same error may break
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S  # named in a reason


@dataclass(frozen=True, kw_only=True)
class StopJob:
    """The job must end. ``exit_code`` is 70 for a spent budget, 65 if no node has the state; for an
    error of the script 2 if that is its exit code, else 1."""

    reason: str
    exit_code: int


class _ScriptError(NamedTuple):
    """An error of the script itself."""

    text: str  # for users
    step: int | None  # where
    is_exact: bool  # the error was reported by the failed worker itself


def healthy(breakage: Breakage, policy: FailureBudget) -> bool:
    """Whether the world had made progress before it broke.

    Steps can be slow: a world that lasted long and made a few also counts. A world without progress
    is not healthy, however long it lasts.
    """
    lived_long = breakage.lived_s >= policy.healthy_s and not breakage.is_unbuilt
    if breakage.steps is None:
        return lived_long
    return breakage.steps >= policy.healthy_steps or (lived_long and breakage.steps > _LATE_STEPS)


def is_churn(breakage: Breakage, policy: FailureBudget) -> bool:
    """Whether repeated departures of nodes count against the job, because it made no progress.

    Less progress is required than after failures: departures are not the job's fault.
    """
    if breakage.steps is None:
        return bool(breakage.churned) and breakage.lived_s < policy.healthy_s
    return bool(breakage.churned) and breakage.steps <= _LATE_STEPS


def explained(unexplained: Breakage, cause: Breakage) -> tuple[Breakage, Breakage] | None:
    """The two breakages counted as one, if the second one explains the first; otherwise None.

    The peers of a dead worker report their broken connections at once; its own agent may be later
    than ``FAILURE_SETTLE_S``. Then the next world still includes the dead worker, and breaks
    before its first step.
    """
    follows = cause.generation == unexplained.generation + 1 and cause.steps == 0
    if not (unexplained.is_unexplained and follows and (cause.failures or cause.lost)):
        return None
    steps = unexplained.steps
    lived_s = unexplained.lived_s + cause.lived_s
    return replace(unexplained, counts=False), replace(cause, steps=steps, lived_s=lived_s)


def continued(last: Breakage, breakage: Breakage) -> Breakage | None:
    """The two breakages as one, if the groups of both worlds, one after the other, could not be
    built; otherwise None. An outage of the network is one incident, however many attempts it
    takes, and displaces no others."""
    is_next = breakage.generation == last.generation + 1 and not breakage.steps
    if not (last.is_failed_build and breakage.is_failed_build and is_next):
        return None
    return replace(
        breakage,
        lived_s=breakage.at_s - last.began_s,
        steps=last.steps,
        excluded=breakage.excluded or last.excluded,
        attempts=last.attempts + breakage.attempts,
    )


def departed_again(
    names: Iterable[str], history: Sequence[Breakage], generation: int, since_s: float
) -> tuple[str, ...]:
    """The names that were also lost, or left, in an older world since ``since_s``."""
    known = {
        name
        for breakage in history
        if breakage.generation < generation and breakage.at_s >= since_s
        for name in (*breakage.lost, *breakage.left)
    }
    return tuple(name for name in names if name in known)


def verdict(history: Sequence[Breakage], now: float, policy: FailureBudget) -> StopJob | None:
    """Whether the broken worlds (newest last) are a reason to stop."""
    return (
        _no_state_left(history)
        or _same_error_at_one_step(history, policy)
        or _same_error_in_a_row(history, policy)
        or _same_exit_after_the_same_time(history, policy)
        or _budget_spent(history, now, policy)
        or _no_step_made(history, policy)
    )


def _no_state_left(history: Sequence[Breakage]) -> StopJob | None:
    failures = history[-1].failures if history and not history[-1].excluded else ()
    for failure in failures:
        if has_no_state(failure):
            error = f"{error_line(failure)} (on {failure.node})"
            hint = exception_of(failure.text or "").partition("\n")[2]
            return StopJob(
                reason=f"no node has the state of the job: {error}\n{hint[:_HINT]}".strip(),
                exit_code=CheckpointRequired.exit_code,
            )
    return None


def has_no_state(failure: Failure | FailureRecord) -> bool:
    """Whether this library refused to begin without the job's state: all ranks of a world raise
    that error. A script may exit with the same code for a reason of its own."""
    is_ours = exception_type(failure.text or "") == CheckpointRequired.__name__
    return is_ours and failure.exit_code == CheckpointRequired.exit_code


def _same_error_at_one_step(history: Sequence[Breakage], policy: FailureBudget) -> StopJob | None:
    """The newest error has occurred at its step before, and the job never got past it."""
    if not history or not history[-1].is_failure:
        return None
    newest = history[-1]
    for key, error in _script_errors(newest).items():
        if error.step is None:
            continue
        times = sum(1 for _ in _occurrences(history, key, error.step))
        if times >= policy.same_error:
            reason = f"the script failed {times} times at step {error.step} in the same way"
            return _stop(f"{reason}: {error.text}", newest)
    return None


def _occurrences(history: Sequence[Breakage], key: str, step: int) -> Iterator[Breakage]:
    """Breakages by this error at this step, newest first, since the job last got past the step."""
    for breakage in reversed(history):
        error = _script_errors(breakage).get(key) if breakage.is_failure else None
        if error is not None and error.step == step:
            yield breakage
        elif breakage.step is not None and breakage.step > step + _STEP_AHEAD:
            return


def _same_error_in_a_row(history: Sequence[Breakage], policy: FailureBudget) -> StopJob | None:
    row = _row_without_progress(history, policy)
    if len(row) < policy.same_error:
        return None
    errors = [_script_errors(breakage) for breakage in row]  # the newest first
    # In the order of the newest report: the first to fail comes first.
    for key, error in errors[0].items():
        places = [place_of[key] for place_of in errors if key in place_of]
        if len(places) == len(row) and not _moves_forward(places):
            reason = (
                f"the script failed {len(row)} times in a row with the same error: {error.text}"
            )
            return _stop(reason, row[0])
    return None


def _same_exit_after_the_same_time(
    history: Sequence[Breakage], policy: FailureBudget
) -> StopJob | None:
    """The script has exited with one code and without an exception, each time after the same time.

    As one does that handles the error of a collective that has timed out, after half an hour, and
    calls sys.exit(1). Where steps are not known, such a world looks healthy.
    """
    row = history[-policy.same_error :]
    lived_s = [breakage.lived_s for breakage in row]
    is_known = any(breakage.steps is not None for breakage in row)
    if len(row) < policy.same_error or is_known or max(lived_s) > _SAME_TIME * min(lived_s):
        return None
    codes = [{*_script_errors(b)} if b.is_failure else set() for b in row]
    for failure in row[-1].failures:
        code = f"exit {failure.exit_code}"
        if not failure.text and all(code in exits for exits in codes):
            reason = (
                f"the script exited {len(row)} times in a row with exit code {failure.exit_code} "
                f"(on {failure.node}) and without an exception, after {lived_s[-1]:.0f} s each time"
            )
            return _stop(reason, row[-1])
    return None


def _row_without_progress(history: Sequence[Breakage], policy: FailureBudget) -> list[Breakage]:
    """The last failures, newest first; shorter if the job made progress between two of them."""
    row: list[Breakage] = []
    for breakage in reversed(history):
        if breakage.is_failure:
            row.append(breakage)
        if len(row) == policy.same_error or healthy(breakage, policy):
            break
    return row


def _moves_forward(places: Sequence[_ScriptError]) -> bool:
    """Whether an error, the newest first, was at a later step every time."""
    steps = [place.step for place in places if place.step is not None and place.is_exact]
    pairs = itertools.pairwise(steps)
    return len(steps) == len(places) and all(newer > older for newer, older in pairs)


def _stop(reason: str, breakage: Breakage) -> StopJob:
    return StopJob(reason=reason, exit_code=exit_code_of(f.exit_code for f in breakage.failures))


def exit_code_of(codes: Iterable[int | None]) -> int:
    """The exit code of a job that an error of the script ends: a worker's 2, for wrong usage, or
    1."""
    return _WRONG_USAGE if _WRONG_USAGE in codes else 1


def _script_errors(breakage: Breakage) -> dict[str, _ScriptError]:
    """The errors of the script itself, by their comparable text."""
    failures = breakage.failures
    if breakage.lost or not failures or any(_is_killed(f) for f in failures):
        return {}
    own = [f for f in failures if f.is_oom_kill or (f.text and not is_consequence(f.text))]
    if own:
        errors: dict[str, _ScriptError] = {}
        for f in own:
            place = innermost_place(f.text or "")
            text = f"{error_line(f)} (on {f.node}{place and f', {place}'})"
            errors.setdefault(comparable(f), _at_step(text, f, breakage))
        return errors
    if any(f.exit_code is None or f.exit_code <= 0 for f in failures):
        return {}
    return {
        f"exit {f.exit_code}": _at_step(f"exit code {f.exit_code} (on {f.node})", f, breakage)
        for f in failures
        if not f.text
    }


def _is_killed(failure: Failure) -> bool:
    return failure.exit_code in _KILLED and not failure.is_oom_kill


def _at_step(text: str, failure: Failure, breakage: Breakage) -> _ScriptError:
    is_exact = failure.step is not None
    return _ScriptError(text, failure.step if is_exact else breakage.step, is_exact)


def comparable(failure: Failure) -> str:
    """The text without parts that differ between occurrences of the same error."""
    if failure.is_oom_kill:
        return "out of memory"  # the rest of its text is a pid
    if not failure.text:
        return f"exit {failure.exit_code}"
    return normalize(failure.text)


class FailedStarts:
    """Counts failures of a node's workers in a row before they are in any world, where no breakage
    counts them."""

    def __init__(self) -> None:
        self._error, self._count, self._since_s = "", 0, 0.0

    def clear(self) -> None:
        """The workers were in a world."""
        self._count = 0

    def failed(self, failure: Failure, now: float) -> bool:
        """Whether the workers have now failed in the same way so often, and for so long (a file
        system may be away), that another start will not help. A signal from outside says nothing
        about that."""
        error = comparable(failure)
        if self._count == 0 or error != self._error:
            self._error, self._count, self._since_s = error, 0, now
        self._count = 0 if _is_killed(failure) else self._count + 1
        return self._count >= IN_A_ROW and now >= self._since_s + FAILED_STARTS_S


def _budget_spent(history: Sequence[Breakage], now: float, policy: FailureBudget) -> StopJob | None:
    spent, churned = 0, 0
    for breakage in reversed(history):
        if breakage.at_s < now - policy.failure_window_s:
            break
        spent += breakage.counts
        churned += breakage.counts and bool(breakage.churned)
        if healthy(breakage, policy):  # it resets the budget
            break
    if spent <= policy.budget or not history[-1].counts:
        return None
    last = history[-1]
    if last.is_unexplained and spent == policy.budget + 1:
        return None  # the next world may explain it, and is then the reason
    by_churn = f" ({churned} of them because nodes departed repeatedly)" if churned else ""
    reason = (
        f"{spent} worlds broke within {policy.failure_window_s:g} s{by_churn}, none of them lasted "
        f"{policy.healthy_s:g} s; the last was generation {last.generation} ({what_broke(last)})"
    )
    return StopJob(reason=reason, exit_code=70)


def _no_step_made(history: Sequence[Breakage], policy: FailureBudget) -> StopJob | None:
    """More worlds than the budget ended without a step, over its window or longer.

    Each of them may take longer than the window has time for: the build of a group whose peers
    do not answer, a collective that times out, both after half an hour by torch's defaults. Of
    worlds that slow, as many as of the same error are enough.
    """
    row = _row_without_a_step(history, policy)
    worlds = sum(b.attempts for b in row if b.counts or b.is_failed_build)
    if not (row and (row[0].counts or row[0].is_failed_build)):
        return None
    lasted_s = row[0].at_s - row[-1].began_s
    slow_s = worlds * max(policy.failure_window_s, _SLOW_S)
    are_slow = worlds >= policy.same_error and lasted_s >= slow_s
    if lasted_s < policy.failure_window_s or not (are_slow or worlds > policy.budget):
        return None
    reason = (
        f"{worlds} worlds in a row ended without a step within {lasted_s:.0f} s; the last was "
        f"generation {row[0].generation} ({what_broke(row[0])})"
    )
    return StopJob(reason=f"{reason}\n{_remedy(row, policy)}", exit_code=70)


def _row_without_a_step(history: Sequence[Breakage], policy: FailureBudget) -> list[Breakage]:
    """The last breakages between which the job made no step, newest first."""
    row: list[Breakage] = []
    for breakage in reversed(history):
        is_known = breakage.steps is not None
        has_stepped = (breakage.steps or 0) > _LATE_STEPS or healthy(breakage, policy)
        # Steps before a group that could not be built were made in the world before.
        if has_stepped and not breakage.is_failed_build:
            break
        # A world that was replaced without breaking is not in the history.
        if row and not is_known and row[-1].began_s - breakage.at_s >= policy.healthy_s:
            break
        row.append(breakage)
        if has_stepped:
            break
    return row


def _remedy(row: Sequence[Breakage], policy: FailureBudget) -> str:
    last = row[0]
    if rule_of(last.verdict) == COLLECTIVE_TIMEOUT:
        longest_s = max(b.lived_s for b in row if b.is_unexplained or b is last)
        return (
            "a collective ends after collective_timeout_s="
            f"{policy.collective_timeout_s:g}, and a rank arrived later each time (it read data, "
            f"evaluated or saved); these worlds lasted up to {longest_s:.0f} s: set "
            "collective_timeout_s in --rdzv-conf well above that, or make that rank faster"
        )
    if last.is_unbuilt:
        return (
            "run `elastic doctor` on these nodes: all ports must be open between them (a "
            "firewall), on the network that the agents announce (--local-addr, "
            "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        )
    return "read the logs of these nodes at these times, and fix the errors"


def what_broke(breakage: Breakage) -> str:
    """In one sentence: the lost nodes, those that left, and the most informative line of each
    error."""
    parts = [f"{name} lost" for name in breakage.lost]
    parts += [f"{name} left" for name in breakage.left]
    parts += [f"{f.node}: {error_line(f)}" for f in breakage.failures]
    return "; ".join(parts) or breakage.verdict or "no failure was reported"


def error_line(failure: Failure) -> str:
    """The error in one line: of a traceback, the exception itself."""
    return exception_line(failure.text or "") or f"exit code {failure.exit_code}"


@dataclass(frozen=True, kw_only=True)
class FlapPolicy:
    """How often a node may be lost or reported before it is quarantined for ``quarantine_s``, and
    for twice as long each further time without a pause in between."""

    losses: int = 3
    first_failures: int = 3
    flap_window_s: float = FLAP_WINDOW_S
    quarantine_s: float = QUARANTINE_S


class FlapTracker:
    """The nodes, by name, that are quarantined: those that are lost repeatedly, and one that is
    repeatedly the first to fail. State without I/O; for one thread."""

    def __init__(self, policy: FlapPolicy | None = None) -> None:
        self._policy = policy or FlapPolicy()
        self._losses: dict[str, deque[float]] = {}
        self._failed_first = ""
        self._first_failures: list[float] = []
        self._until: dict[str, float] = {}
        self._last_s: dict[str, float] = {}  # the duration of each last quarantine

    def lost(self, node: str, now: float) -> None:
        """A node was lost. The third time within ``flap_window_s`` it is quarantined."""
        times = self._losses.setdefault(node, deque(maxlen=self._policy.losses))
        times.append(now)
        if len(times) == self._policy.losses and now - times[0] <= self._policy.flap_window_s:
            self.quarantine(node, now)
        self._forget(now)

    def found(self, node: str) -> None:
        """A node that was reported as lost is alive: its last loss does not count."""
        if times := self._losses.get(node):
            times.pop()
            if not times:
                del self._losses[node]

    def failed_first(self, node: str, now: float) -> None:
        """A node was the first to fail in a world that lost no node.

        The third time in a row it is quarantined. The count restarts with a report against another
        node, and after ``flap_window_s`` without any.
        """
        fresh = (
            self._first_failures and now - self._first_failures[-1] <= self._policy.flap_window_s
        )
        if node != self._failed_first or not fresh:
            self._failed_first, self._first_failures = node, []
        self._first_failures.append(now)
        if len(self._first_failures) >= self._policy.first_failures:
            self.quarantine(node, now)
            self._first_failures = []

    def __contains__(self, node: str) -> bool:
        """Whether this name or id is, or was a moment ago, quarantined."""
        return node in self._until

    def quarantined(self, now: float) -> dict[str, float]:
        """Name or id -> until when."""
        return {node: until for node, until in self._until.items() if now < until}

    def quarantine(self, node: str, now: float) -> None:
        """Exclude this node for ``quarantine_s``. ``node`` is a name, or an id if the node is
        alive: several agents of one machine may share a name."""
        last_s = self._last_s.get(node, 0.0)
        if now >= self._until.get(node, math.inf):  # otherwise it is the same incident
            is_again = now < self._forgotten_at_s(node)
            last_s = min(2 * last_s, self._longest_s) if is_again else 0.0
        self._last_s[node] = last_s or self._policy.quarantine_s
        self._until[node] = now + self._last_s[node]

    @property
    def _longest_s(self) -> float:
        return MAX_DOUBLED * self._policy.quarantine_s

    def _forgotten_at_s(self, node: str) -> float:
        """Until when another quarantine is a consequence of what caused the last one."""
        return self._until[node] + max(self._last_s[node], self._policy.flap_window_s)

    def _forget(self, now: float) -> None:
        # Names of nodes that join and leave for weeks must not accumulate.
        horizon = now - self._policy.flap_window_s
        self._losses = {n: t for n, t in self._losses.items() if t[-1] >= horizon}
        self._until = {n: t for n, t in self._until.items() if now < self._forgotten_at_s(n)}
        self._last_s = {n: s for n, s in self._last_s.items() if n in self._until}
