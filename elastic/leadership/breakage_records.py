"""Breakages as stored in a world's record, for the next leader and the failure timeline."""

from __future__ import annotations

from elastic.leadership.roster import Failed
from elastic.membership import failure_budget as budget
from elastic.membership.records import BreakageRecord, FailureRecord

# Enough to detect three times in a row, bounded in size.
REMEMBERED = 16
_TEXT_CHARS = 300


def remembered(failed: Failed) -> budget.Failure:
    """Shortened as in a record: texts of two leaders are compared."""
    text = failed.text and failed.text[-_TEXT_CHARS:]
    return budget.Failure(
        node=failed.node,
        text=text,
        exit_code=failed.exit_code,
        step=failed.step,
        is_oom_kill=failed.is_oom_kill,
    )


def to_record(breakage: budget.Breakage, time_s: float) -> BreakageRecord:
    """``time_s``: by the wall clock."""
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
        lost=breakage.lost,
        time_s=time_s,
        left=breakage.left,
        churned=breakage.churned,
        counts=breakage.counts,
        step=breakage.step,
        excluded=breakage.excluded,
        verdict=breakage.verdict,
        response=breakage.response,
    )


def from_record(record: BreakageRecord, at_s: float) -> budget.Breakage:
    """``at_s``: by this leader's monotonic clock."""
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
    """The last ones, newest last. Those that do not count are dropped first: frequently joining and
    leaving nodes must not displace the failures between them."""
    surplus = len(breakages) - most
    if surplus <= 0:
        return list(breakages)
    idle = [i for i, b in enumerate(breakages) if not b.counts][:surplus]
    kept = [b for i, b in enumerate(breakages) if i not in idle]
    return kept[-most:]
