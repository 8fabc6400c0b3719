"""What failures mean for the job: breakages, budgets, and the timeline of failures."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from elastic.agent.roster import Failed
from elastic.errors import BudgetSpent
from elastic.hangs.verdict import Confidence
from elastic.membership import budget
from elastic.membership.budget import IN_A_ROW, FailedBuilds, has_no_state
from elastic.membership.decision import listed
from elastic.membership.failures import (
    UNKNOWN,
    Action,
    FailureFacts,
    FailureVerdict,
    is_consequence,
    judge_failure,
)
from elastic.membership.records import BreakageRecord, Done, FailureRecord, Keys, WorldRecord
from elastic.membership.view import MemberStatus, Proposal, StepRate
from elastic.tracebacks import condense, exception_line, innermost_place
from elastic.tuning.intervals import HEALTHY_S
from elastic.tuning.options import AgentOptions
from elastic.wire.messages import Cause, WorldState

# If the group of the same members repeatedly cannot be built, each further attempt waits twice as
# long, from a second up to this: a network that returns is used soon.
BUILD_BACKOFF_CAP_S = 30.0

# ----------------------------------------------------------------------------
# Breakages as stored in a world's record, for the next leader and the failure timeline.

# Enough to detect three failures in a row; bounds the size of the record.
REMEMBERED = 16
_TEXT_CHARS = 300
_NAMES = 64  # of nodes that were lost, or left, together: only a few are looked for again


def remembered(failed: Failed) -> budget.Failure:
    """A failure with its text shortened as in a record, so that texts of two leaders compare
    equal."""
    text = failed.text and condense(failed.text, _TEXT_CHARS)
    return budget.Failure(
        node=failed.node,
        text=text,
        exit_code=failed.exit_code,
        step=failed.step,
        is_oom_kill=failed.is_oom_kill,
    )


def to_record(breakage: budget.Breakage, time_s: float) -> BreakageRecord:
    """The record of a breakage at ``time_s`` of the wall clock."""
    return BreakageRecord(
        generation=breakage.generation,
        lived_s=breakage.lived_s,
        steps=breakage.steps,
        failures=tuple(
            FailureRecord(
                node=f.node,
                text=f.text,
                exit_code=f.exit_code,
                step=f.step,
                is_oom_kill=f.is_oom_kill,
            )
            for f in breakage.failures
        ),
        lost=breakage.lost[:_NAMES],
        time_s=time_s,
        left=breakage.left[:_NAMES],
        churned=breakage.churned[:_NAMES],
        counts=breakage.counts,
        step=breakage.step,
        excluded=breakage.excluded,
        verdict=breakage.verdict,
        response=breakage.response,
        attempts=breakage.attempts,
    )


def from_record(record: BreakageRecord, at_s: float) -> budget.Breakage:
    """The breakage of a record, at ``at_s`` of this leader's monotonic clock."""
    return budget.Breakage(
        generation=record.generation,
        lived_s=record.lived_s,
        steps=record.steps,
        failures=tuple(
            budget.Failure(f.node, f.text, f.exit_code, f.step, f.is_oom_kill)
            for f in record.failures
        ),
        lost=record.lost,
        at_s=at_s,
        left=record.left,
        churned=record.churned,
        counts=record.counts,
        step=record.step,
        excluded=record.excluded,
        verdict=record.verdict,
        response=record.response,
        attempts=record.attempts,
    )


def newest(breakages: list[budget.Breakage], most: int) -> list[budget.Breakage]:
    """At most ``most`` breakages, newest last. Those that do not count are dropped first: nodes
    that join and leave frequently must not displace the failures between them."""
    surplus = len(breakages) - most
    if surplus <= 0:
        return list(breakages)
    dropped = [i for i, b in enumerate(breakages) if not b.counts][:surplus]
    kept = [b for i, b in enumerate(breakages) if i not in dropped]
    return kept[-most:]


# ----------------------------------------------------------------------------
# The leader's accounting for the job and its nodes: failures, flapping, churn, failed builds.
#
# State without I/O, for one term of leadership. Every broken world is counted once, with the facts
# known when its successor was decided; that determines whether the job must stop, and which node
# is quarantined. Losses and departures are recorded, too: the same node again, without progress of
# the job, is churn, and uses up the budget. The first failure of a world is judged by its text
# (:mod:`elastic.membership.failures`): a faulty machine is quarantined at once, an error that
# every attempt repeats ends the job.

_VERDICT_CHARS = 200
_FROM_OUTSIDE = (-9, -15)  # SIGKILL, SIGTERM: not caused by the node


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A world, and the facts from which its replacement was decided."""

    members: MemberStatus
    proposal: Proposal
    since_s: float  # when the world was formed
    failures: tuple[Failed, ...]  # of its members' workers, the first to fail first

    @property
    def is_broken(self) -> bool:
        """Joining and leaving do not break a world."""
        members = self.members
        lost = any(g.cause is Cause.LOST for g in members.gone)
        return bool(lost or members.out or members.failure_reports)

    def gone(self, cause: Cause) -> tuple[str, ...]:
        """Names of the members that were lost, or left."""
        names = {m.node_id: m.name for m in self.members.world.members}
        return tuple(names[g.node_id] for g in self.members.gone if g.cause is cause)

    @property
    def origin(self) -> Failed | None:
        """The first failure that is not the consequence of another one, according to the texts;
        otherwise the first."""
        failures = self.failures
        own = (f for f in failures if not is_consequence(f.text, f.kernel_log))
        return next(own, failures[0] if failures else None)


class FailureAccounting:
    """Counts every broken world, and records which nodes are quarantined."""

    def __init__(self, options: AgentOptions) -> None:
        self._quarantine_s = options.quarantine_s
        self._policy = budget.FailureBudget(
            budget=options.failure_budget,
            failure_window_s=options.failure_window_s,
            healthy_s=min(HEALTHY_S, options.failure_window_s / 4),
            collective_timeout_s=options.collective_timeout_s,
        )
        self._breakages: list[budget.Breakage] = []
        self.flaps = budget.FlapTracker(budget.FlapPolicy(quarantine_s=options.quarantine_s))
        self._builds = FailedBuilds()
        self._joined_s: dict[str, float] = {}  # node_id -> when it joined a running job
        self._step: int | None = None  # the job's, when it broke last or was first seen
        self._step_at_change: int | None = None  # or a node left
        self._counted = 0  # the newest generation that was counted
        self._left = 0  # the newest generation whose leaving nodes were remembered
        self._has_trained = False  # workers of this job have made steps on some node
        # Nodes that joined a running job -> the first generation with them.
        self._joined_in: dict[str, int] = {}
        self._verdict: tuple[Failed, FailureVerdict] | None = None
        self._quarantine_reasons: dict[str, str] = {}

    def remember(self, world: WorldRecord | None, now: float, wall_s: float) -> None:
        """Begin a term with the last leader's records. (A leader whose own workers fail hands over
        leadership: otherwise their failures would never add up.)"""
        records = world.breakages if world is not None else ()
        # The clocks of two leaders may differ by days: no record is newer than the newest one.
        newest_s = max([wall_s, *(r.time_s for r in records)])
        if world is not None:
            newest_s = max(newest_s, world.time_s)
        self._breakages = [from_record(r, now - (newest_s - r.time_s)) for r in records]
        for breakage in self._breakages:
            if breakage.excluded:
                self.flaps.quarantine(breakage.excluded, breakage.at_s)
        if world is not None and world.cause is Cause.JOINED:
            joined = (m.node_id for m in world.members if m.ran_generation == 0)
            self._joined_in = dict.fromkeys(joined, world.generation)
        # Steps are counted from the last breakage: counted from the beginning of this term, there
        # would be none at the failure that began it.
        if steps := [b.step for b in self._breakages if b.step is not None]:
            self._step, self._step_at_change = max(steps), steps[-1]
            self._has_trained = self._step > 0

    def records(self, now: float, wall_s: float) -> tuple[BreakageRecord, ...]:
        """The records for the next world's record."""
        latest = newest(self._breakages, REMEMBERED)
        return tuple(to_record(b, wall_s - (now - b.at_s)) for b in latest)

    @property
    def quarantine_reasons(self) -> Mapping[str, str]:
        """Node id -> the failure for which it was quarantined last."""
        return self._quarantine_reasons

    @property
    def retry_at_s(self) -> float | None:
        """When the next group is attempted, if several could not be built in a row."""
        row = itertools.takewhile(lambda b: b.is_failed_build, reversed(self._breakages))
        in_a_row = sum(b.attempts for b in row)
        if in_a_row < IN_A_ROW:
            return None
        pause_s = min(BUILD_BACKOFF_CAP_S, 2.0 ** (in_a_row - IN_A_ROW))
        return self._breakages[-1].at_s + pause_s

    @property
    def verdict(self) -> tuple[Failed, FailureVerdict] | None:
        """The verdict on the failure that broke the last counted world; None if no worker failed
        first."""
        return self._verdict

    def observe(self, step_rate: StepRate | None) -> None:
        """Update the job's progress. Steps are counted from the first one reported."""
        self._has_trained |= step_rate is not None and step_rate.step > (self._step or 0)
        if step_rate is not None:
            self._step = step_rate.step if self._step is None else self._step
            if self._step_at_change is None:
                self._step_at_change = step_rate.step

    def formed(self, before: WorldRecord | None, world: WorldRecord, now: float) -> None:
        """A world was written: record which nodes joined a running job."""
        horizon = now - self._quarantine_s
        self._joined_s = {n: t for n, t in self._joined_s.items() if t > horizon}
        ids = frozenset(world.node_ids)
        self._joined_in = {n: g for n, g in self._joined_in.items() if n in ids}
        if before is None or ids.isdisjoint(before.node_ids):
            return
        joined = ids.difference(before.node_ids)
        self._joined_in |= dict.fromkeys(joined, world.generation)
        if world.mode == "in-process":
            self._joined_s |= dict.fromkeys(joined, now)

    def count(
        self, broken: Broken, step_rate: StepRate | None, now: float
    ) -> budget.StopJob | None:
        """Count a broken world, once regardless of how often its successor is proposed. Returns
        the reason if the job must stop."""
        self._verdict = None
        broken = replace(broken, failures=self._uncounted(broken.failures))
        world = broken.members.world
        left = broken.gone(Cause.LEFT)
        if not broken.is_broken:
            if not left or world.generation <= max(self._counted, self._left):
                return None
            self._left = world.generation
            return self._remember(self._breakage(broken, None, step_rate, now), now)
        if world.generation <= self._counted:
            return None
        self._counted = world.generation
        steps = self._steps_made(step_rate)
        already_out = set(self.flaps.quarantined(now))
        self._count_joining_nodes(broken, now)
        unreached = self._count_builds(broken, now)
        if not _is_job_failure(broken):
            lost = self._explaining(self._breakage(broken, None, step_rate, now))
            return self._remember(lost, now)
        breakage = self._explaining(self._breakage(broken, steps, step_rate, now))
        is_late = bool(broken.failures) and all(map(self._is_late, broken.failures))
        if is_late or self._continues_last(broken, breakage):
            breakage = replace(breakage, counts=False)
        if breakage.is_failed_build:
            breakage = replace(breakage, excluded=unreached)
        self._step_at_change = self._step
        origin = broken.origin
        if origin is not None and not budget.healthy(breakage, self._policy):
            self.flaps.failed_first(origin.node, now)
        stop = self._judge(broken, breakage, now)
        if (judged := self.verdict) is not None:
            failed, verdict = judged
            text = f"{verdict.action.value}: {verdict.reason}"[:_VERDICT_CHARS]
            excluded = failed.node if verdict.action is Action.EXCLUDE_NODE else ""
            # A node that has just joined is not the job: its failures do not use up the budget.
            is_new = self._has_joined(failed, breakage, world)
            counts = breakage.counts and not (excluded and is_new)
            breakage = replace(breakage, verdict=text, excluded=excluded, counts=counts)
        out = [n for n in self.flaps.quarantined(now) if n not in already_out]
        return self._remember(replace(breakage, response=self._response(broken, out)), now, stop)

    def _breakage(
        self, broken: Broken, steps: int | None, step_rate: StepRate | None, now: float
    ) -> budget.Breakage:
        """The record of a broken world. ``steps`` applies if it is the job's own failure;
        otherwise it may be churn."""
        world = broken.members.world
        is_own = broken.is_broken and _is_job_failure(broken)
        lost, left = _lost_without_report(broken), broken.gone(Cause.LEFT)
        departed = lost if is_own else (*broken.gone(Cause.LOST), *left)
        breakage = budget.Breakage(
            generation=world.generation,
            lived_s=now - broken.since_s,
            failures=tuple(map(remembered, broken.failures[:REMEMBERED])),
            lost=lost if is_own else broken.gone(Cause.LOST),
            left=left,
            at_s=now,
            # A group that could not be built is an attempt, not a fault of a node or the script.
            counts=not _is_failed_build(broken),
            steps=steps if is_own else self._steps_since_change(step_rate),
            step=step_rate.step if step_rate is not None else None,
            verdict=_reported(broken),
        )
        if is_own:
            return breakage
        since_s = now - self._policy.failure_window_s
        # Several agents of one machine may share a name: then it identifies none of them.
        names = Counter(m.name for m in world.members)
        departed = tuple(name for name in departed if names[name] == 1)
        again = budget.departed_again(departed, self._breakages, world.generation, since_s)
        breakage = replace(breakage, churned=again)
        breakage = replace(breakage, counts=budget.is_churn(breakage, self._policy))
        return replace(breakage, response=self._response(broken, ()))

    def _explaining(self, breakage: budget.Breakage) -> budget.Breakage:
        """The breakage to record; if it explains the last one, they count as one."""
        if self._breakages and (pair := budget.explained(self._breakages[-1], breakage)):
            self._breakages[-1], breakage = pair
        return breakage

    def _continues_last(self, broken: Broken, breakage: budget.Breakage) -> bool:
        """Whether members failed before they had entered this world: one statement has failed on
        several nodes, on some of them only after the world without the first was formed. Counted
        separately, one incident would look like a failure that repeats."""
        world, last = broken.members.world, next(iter(self._breakages[-1:]), None)
        is_next = last is not None and last.generation == world.generation - 1 and last.failures
        members = (*broken.members.running, *broken.members.out)  # the failed ones, too
        newest = max((n.node.last_run or 0 for n in members), default=0)
        is_entered = world.mode != "in-process" or newest >= world.generation
        return bool(is_next and breakage.failures and not is_entered and not breakage.steps)

    def _remember(
        self, breakage: budget.Breakage, now: float, stop: budget.StopJob | None = None
    ) -> budget.StopJob | None:
        """Record a breakage. Returns the reason if the job must stop."""
        if self._breakages and (one := budget.continued(self._breakages[-1], breakage)):
            del self._breakages[-1]
            breakage = one
        # Older ones are never evaluated.
        most = max(self._policy.budget + 2, REMEMBERED)
        self._breakages = newest([*self._breakages, breakage], most)
        stop = stop or budget.verdict(self._breakages, now, self._policy)
        if stop is not None:
            ended = replace(breakage, response=f"ended the job with exit code {stop.exit_code}")
            self._breakages[-1] = ended
        return stop

    @staticmethod
    def _response(broken: Broken, quarantined: Iterable[str]) -> str:
        """The leader's response, for users."""
        proposal = broken.proposal
        names = {m.node_id: m.name for m in broken.members.world.members}
        out = [names.get(node, node) for node in quarantined]
        nodes = [
            n.name for n in proposal.nodes if n.name not in out and n.node_id not in quarantined
        ]
        parts = [f"quarantined {listed(out)}"] if out else []
        world = f"generation {proposal.generation} with {listed(nodes) or 'no nodes'}"
        parts.append(f"{'paused' if proposal.state is WorldState.PAUSED else 'formed'} {world}")
        return ", ".join(parts)

    def _judge(
        self, broken: Broken, breakage: budget.Breakage, now: float
    ) -> budget.StopJob | None:
        """The verdict on the first failure. It counts only if no node was lost: a survivor's error
        may be a consequence of that, whatever its text."""
        first = broken.origin
        if first is None or breakage.lost:
            return None
        has_trained = self._has_trained or budget.healthy(breakage, self._policy)
        world = broken.members.world
        # Workers of restart mode report no steps. The others ran without failure when it joined.
        is_first = self._joined_in.get(first.node_id) == world.generation
        has_trained |= is_first and world.cause is Cause.JOINED
        error = budget.comparable(remembered(first))
        alike = {f.node_id for f in broken.failures if budget.comparable(remembered(f)) == error}
        works_elsewhere = has_trained and not alike.issuperset(world.node_ids)
        # Nodes fail one after the other, some only in the next world.
        alike_before = [
            f.node for b in self._breakages for f in b.failures if budget.comparable(f) == error
        ]
        is_repeated = len(alike) + len(alike_before) > 1  # a single node may have had bad luck
        # How long a world lasted says nothing if its worker reports that it made no step.
        may_have_stepped = first.step is None and budget.healthy(breakage, self._policy)
        has_stepped = self._has_trained or may_have_stepped or first.step or world.committed_step
        fails_everywhere = (
            is_repeated
            and not has_stepped
            and all(m.node_id in alike or m.name in alike_before for m in world.members)
        )
        verdict = judge_failure(
            FailureFacts(
                text=first.text,
                exit_code=first.exit_code,
                is_oom_kill=first.is_oom_kill,
                kernel_log=first.kernel_log,
                works_elsewhere=works_elsewhere,
                fails_everywhere=fails_everywhere,
            )
        )
        ends_job = verdict.action is Action.STOP and verdict.confidence is Confidence.HIGH
        ends_job |= budget.has_no_state(remembered(first))
        joining = {
            f.node_id
            for f in broken.failures
            if self._has_joined(f, breakage, world) and not _was_killed(f)
        }
        is_new = first.node_id in joining
        if works_elsewhere and (ends_job or is_new) and self._is_alone(first, joining, broken):
            # The others train with the same script: an error that only this node has is its own, or
            # of nodes that joined with it.
            verdict = replace(verdict, action=Action.EXCLUDE_NODE, reason=_only_here(verdict))
        self._verdict = first, verdict
        if verdict.action is Action.EXCLUDE_NODE:
            for node_id in {first.node_id, *(joining if is_new else ())}:
                self.flaps.quarantine(node_id, now)
                self._tell_why(node_id, str(verdict))
        if verdict.action is Action.STOP and verdict.confidence is Confidence.HIGH:
            return budget.StopJob(
                reason=f"the script failed on {first.node}, and would fail again: {verdict}",
                exit_code=budget.exit_code_of((first.exit_code,)),
            )
        return None

    def _tell_why(self, node_id: str, reason: str) -> None:
        """Record why a node is quarantined."""
        self._quarantine_reasons = {
            **{n: why for n, why in self._quarantine_reasons.items() if n in self.flaps},
            node_id: reason[:_VERDICT_CHARS],
        }

    def _has_joined(self, failed: Failed, breakage: budget.Breakage, world: WorldRecord) -> bool:
        """Whether the node joined the running job with the broken world, which made no progress
        with it."""
        is_first = self._joined_in.get(failed.node_id) == world.generation
        # (Those of the breakage were made since the last one: also in the world before.)
        begun = world.committed_step if world.switch_at_step is None else world.switch_at_step
        steps = breakage.step - begun if breakage.step is not None and begun is not None else None
        return is_first and not budget.healthy(replace(breakage, steps=steps), self._policy)

    def _is_alone(self, first: Failed, joining: Collection[str], broken: Broken) -> bool:
        """Whether no other node has failed in this way, and the others can continue without it.

        Nodes that failed as they joined say nothing of the job: several may have been started with
        one mistake, together or one after the other.
        """
        same = budget.comparable(remembered(first))
        now = (remembered(f) for f in broken.failures if f.node_id not in joining)
        known = (f for b in self._breakages if b.counts for f in b.failures)
        others = (f for f in (*now, *known) if f.node != first.node)
        rest = [n for n in broken.proposal.nodes if n.node_id not in {first.node_id, *joining}]
        per_replica = broken.members.world.nodes_per_replica
        whole = len(rest) - len(rest) % per_replica
        suffice = whole >= max(1, broken.proposal.min_nodes)
        return suffice and all(budget.comparable(f) != same for f in others)

    def _uncounted(self, failures: tuple[Failed, ...]) -> tuple[Failed, ...]:
        """The first failure of each node that no breakage contains yet. A node's record keeps its
        failure until its next workers start, while the others may break further worlds."""
        first: dict[str, Failed] = {}
        for failed in failures:
            if not self._is_counted(failed):
                first.setdefault(failed.node_id, failed)
        return tuple(first.values())

    def _is_late(self, failed: Failed) -> bool:
        """Whether a node failed in a world that was counted for another node's failure: all
        nodes may fail in the same way, and are observed one after the other."""
        return any(
            b.generation == failed.generation and b.counts and bool(b.failures)
            for b in self._breakages
        )

    def _is_counted(self, failed: Failed) -> bool:
        generation, failure = failed.generation, remembered(failed)
        return generation is not None and any(
            generation <= b.generation and failure in b.failures for b in self._breakages
        )

    def _steps_made(self, step_rate: StepRate | None) -> int | None:
        """Steps made since the last breakage. A restart from a checkpoint that does not get beyond
        the job's previous position is not progress."""
        if step_rate is None:
            return None
        before, self._step = self._step, max(step_rate.step, self._step or 0)
        return None if before is None else self._step - before

    def _steps_since_change(self, step_rate: StepRate | None) -> int | None:
        """Steps made since the last loss, departure or breakage."""
        if step_rate is None:
            return None
        before = self._step_at_change
        self._step_at_change = max(step_rate.step, before or 0)
        return None if before is None else self._step_at_change - before

    def _count_joining_nodes(self, broken: Broken, now: float) -> None:
        """A crash-looping joining node may disturb a healthy job once per quarantine.

        Before the switch it is quarantined regardless of why it ended; afterwards, only if it
        failed on its own within ``quarantine_s``. A node that was killed from outside may return at
        once.
        """
        members = broken.members
        failed = {f.node_id: f for f in broken.failures}
        names = {m.node_id: m.name for m in members.world.members}
        out = {n.node.node_id for n in members.out}
        lost = {g.node_id for g in members.gone if g.cause is Cause.LOST}
        for node_id in out | lost:
            joined_s = self._joined_s.get(node_id)
            if joined_s is None or now - joined_s >= self._quarantine_s:
                continue
            failure = failed.get(node_id)
            by_itself = failure is not None and not _was_killed(failure)
            if members.pending or by_itself:
                # A dead agent returns with another id, under the same name.
                self.flaps.quarantine(node_id if node_id in out else names[node_id], now)
                if by_itself and failure is not None:
                    self._tell_why(node_id, budget.error_line(remembered(failure)))

    def _count_builds(self, broken: Broken, now: float) -> str:
        """Quarantine the nodes that keep groups from being built. Returns the name of the first
        one, for the record: if it led, its successor must not admit it at once."""
        members = broken.members
        reports = {t.node_id: t.unreachable for t in members.failure_reports if t.unreachable}
        names = {m.node_id: m.name for m in members.world.members}
        out = self._builds.failed(
            members.world.node_ids,
            reports,
            has_run=members.has_run,
            joining=self._unconnected(broken),
        )
        for node_id in out:
            self.flaps.quarantine(node_id, now)
            others = [names[n] for n in names if node_id in reports.get(n, ())]
            lacking = [names[n] for n in reports.get(node_id, ()) if n in names]
            if others:
                self._tell_why(node_id, f"{listed(others)} cannot reach it")
            elif lacking:
                self._tell_why(node_id, f"it cannot reach {listed(lacking)}")
        return names[out[0]] if out else ""

    def _unconnected(self, broken: Broken) -> frozenset[str]:
        """The members that have joined the running job since its last group was built."""
        members = (*broken.members.running, *broken.members.out)
        built = max((n.node.last_run or 0 for n in members), default=0)
        return frozenset(n for n, joined in self._joined_in.items() if joined > built)


def _was_killed(failed: Failed) -> bool:
    """From outside: that may happen to any node."""
    return failed.exit_code in _FROM_OUTSIDE and not failed.is_oom_kill


def _only_here(verdict: FailureVerdict) -> str:
    if verdict.rule == UNKNOWN:
        return "the script fails on this node, and on no other node of this job"
    here = "but not on other nodes of this job"
    return verdict.reason if here in verdict.reason else f"{verdict.reason}, {here}"


def _is_failed_build(broken: Broken) -> bool:
    """Whether live members only could not connect to each other."""
    members = broken.members
    is_built = members.has_run or not members.failure_reports
    return not (is_built or members.out or members.gone or broken.failures)


def _reported(broken: Broken) -> str:
    """What members have reported, if no worker failed and no node is gone: of peers that they
    cannot reach, if reports name any."""
    members = broken.members
    if broken.failures or members.gone or not members.failure_reports:
        return ""
    names = {m.node_id: m.name for m in members.world.members}
    sentences, apart = [], []
    for report in members.failure_reports:
        reporter, error = names[report.node_id], exception_line(report.error)[:_VERDICT_CHARS]
        others = [names[i] for i in report.unreachable if i in names and i != report.node_id]
        if others:
            apart.append(f"{reporter} cannot reach {listed(others)}: {error}")
        sentences.append(f"{reporter}: {error}")
    # Both ends of a connection, of which one knows the address.
    return "; ".join(sorted(apart)[:2] or sentences[:1])


def _is_job_failure(broken: Broken) -> bool:
    """Failures while all nodes are alive are the job's own; the loss of nodes is not. In restart
    mode survivors fail because of the loss; in-process they do not: a node that fails there failed
    on its own."""
    if broken.proposal.cause is Cause.FAILURE:
        return True
    if broken.proposal.cause is Cause.UNFINISHED:
        return bool(broken.failures)
    modes = (broken.proposal.mode, broken.members.world.mode)
    return "in-process" in modes and bool(broken.failures)


def _lost_without_report(broken: Broken) -> tuple[str, ...]:
    reported = {f.node_id for f in broken.failures}
    names = {m.node_id: m.name for m in broken.members.world.members}
    gone = (g.node_id for g in broken.members.gone if g.cause is Cause.LOST)
    return tuple(names[node_id] for node_id in gone if node_id not in reported)


# ----------------------------------------------------------------------------
# The failure timeline: one page about a failed job, for its last error, its journal and a file.
#
# Pure: created only from the record of the job's end, so that every node shows the same page.

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
    lived = f"lived {breakage.lived_s:.0f} s"
    if breakage.attempts > 1:
        lived = f"{breakage.attempts} groups could not be built within {breakage.lived_s:.0f} s"
    lines = [
        f"{_utc(breakage.time_s)}  generation {breakage.generation}, "
        f"step {_known(_step(breakage))}: {lived}{progress}",
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
        checkpoint = f" from the last checkpoint before step {step}" if step else ""
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
