"""Findings of a run's agents: hangs, causes of failures, stragglers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.telemetry.journal_reader import JournalRecord


@dataclass(frozen=True)
class HangSummary:
    """A world without progress, and the responsible ranks."""

    at_s: float  # Unix time
    generation: int | None
    kind: str
    ranks: tuple[int, ...]
    confidence: str
    action: str
    reason: str
    report: str  # the path of the hang report, on its node; "": none was written
    node: str  # the node that wrote it


@dataclass(frozen=True)
class VerdictSummary:
    """The leader's verdict on a failure."""

    at_s: float
    generation: int | None
    failed: str  # the node
    action: str
    rule: str
    confidence: str
    reason: str
    evidence: str


@dataclass(frozen=True)
class StragglerSummary:
    """A rank that delayed the others."""

    at_s: float
    generation: int | None
    rank: int | None
    node: str
    cause: str
    factor: float
    reason: str


@dataclass(frozen=True)
class Findings:
    """All findings of a run, in order of time."""

    hangs: tuple[HangSummary, ...]
    verdicts: tuple[VerdictSummary, ...]
    stragglers: tuple[StragglerSummary, ...]


def findings_of(records: Iterable[JournalRecord]) -> Findings:
    """The findings from events in order of time."""
    hangs: dict[object, HangSummary] = {}
    verdicts, stragglers = [], []
    for record in records:
        match record.name:
            case "hang-found":
                hang = _hang(record)
                # Several nodes may report the same hang: the record with a report file is the most
                # complete.
                key = (hang.generation, hang.kind, hang.ranks)
                if key not in hangs or (hang.report and not hangs[key].report):
                    hangs[key] = hang
            case "failure-judged":
                verdicts.append(_verdict(record))
            case "straggler-found":
                stragglers.append(_straggler(record))
            case _:
                pass
    return Findings(tuple(hangs.values()), tuple(verdicts), tuple(stragglers))


def _hang(record: JournalRecord) -> HangSummary:
    ranks = record.data.get("ranks")
    return HangSummary(
        at_s=record.at_s,
        generation=record.whole("generation"),
        kind=record.text("kind"),
        ranks=tuple(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else (),
        confidence=record.text("confidence"),
        action=record.text("action"),
        reason=record.text("reason"),
        report=record.text("report"),
        node=record.node,
    )


def _verdict(record: JournalRecord) -> VerdictSummary:
    return VerdictSummary(
        at_s=record.at_s,
        generation=record.whole("generation"),
        failed=record.text("failed"),
        action=record.text("action"),
        rule=record.text("rule"),
        confidence=record.text("confidence"),
        reason=record.text("reason"),
        evidence=record.text("evidence"),
    )


def _straggler(record: JournalRecord) -> StragglerSummary:
    return StragglerSummary(
        at_s=record.at_s,
        generation=record.whole("generation"),
        rank=record.whole("rank"),
        node=record.text("of_node"),
        cause=record.text("cause"),
        factor=record.number("factor"),
        reason=record.text("reason"),
    )
