"""Breakages as stored in a world's record, for the next leader and the failure timeline."""

from __future__ import annotations

from elastic.leadership.roster import Failed
from elastic.membership import failure_budget as budget
from elastic.membership.records import BreakageRecord, FailureRecord
from elastic.tracebacks import condense

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
