"""The demo's result: what happened, the pauses, and whether every check passed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.cli.demo.journal import JournalEntry
from elastic.cli.demo.plan import ADDED, MAX_NODES, VICTIM, DemoPlan, JobPosition
from elastic.testing.ledger import LedgerError, RunLedger
from elastic.tuning.agent_intervals import DEMO_PATIENCE_S

ACCURACY_NEEDED = 0.97


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One world of the job."""

    generation: int
    cause: str
    reason: str
    nodes: tuple[str, ...]
    first_step: int
    last_step: int | None  # None: it ended before its first step
    # The longest time without a completed step on a survivor, minus the duration of its last step:
    # while the demo waits for a node, steps are slow.
    pause_s: float | None
    recomputed_steps: int  # done here and discarded by a later generation


@dataclass(frozen=True, kw_only=True)
class EpochSamples:
    """How often the samples of an epoch were seen on the surviving lineage."""

    epoch: int
    once: int
    twice: int  # or more
    never: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All results of the demo. ``failures`` is empty if every check passed."""

    mode: str
    generations: tuple[Generation, ...]
    samples: tuple[EpochSamples, ...]
    steps: int  # on the surviving lineage
    recomputed_steps: int
    accuracy: float | None
    killed: str | None  # the job's position at the kill, as text
    added: str | None  # the job's position at the start of the joining node's agent
    duration_s: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """The object that ``-o json`` prints."""
        return {"ok": self.ok, **asdict(self)}


def summarize(
    ledger: RunLedger,
    journal: Iterable[JournalEntry],
    plan: DemoPlan,
    *,
    mode: str,
    accuracy: float | None,
    train_samples: int,
    epochs: int,
    exit_codes: dict[str, int | None],
    duration_s: float,
) -> Summary:
    """Summarize and check the run. Pure."""
    generations = generations_of(ledger, journal)
    samples = samples_of(ledger, train_samples, epochs)
    failures = [
        *_failed_nodes(exit_codes),
        *_failed_plan(generations, plan),
        *_failed_samples(ledger, train_samples, epochs),
        *_failed_weights(ledger),
        *_failed_accuracy(accuracy),
    ]
    return Summary(
        mode=mode,
        generations=generations,
        samples=samples,
        steps=len({s.step for s in ledger.surviving}),
        recomputed_steps=ledger.recomputed_steps,
        accuracy=accuracy,
        killed=_where(VICTIM, plan.killed_at),
        added=_where(ADDED, plan.joined_at),
        duration_s=duration_s,
        failures=tuple(failures),
    )


def generations_of(ledger: RunLedger, journal: Iterable[JournalEntry]) -> tuple[Generation, ...]:
    """Every generation that began on a worker, with the cause recorded in the journals."""
    formed = {e.fields["generation"]: e.fields for e in journal if e.name == "world-formed"}
    pauses = {p.after: max(0.0, p.duration_s - p.step_s) for p in ledger.pauses}
    result = []
    for number in sorted({s.generation for s in ledger.starts}):
        starts = sorted((s for s in ledger.starts if s.generation == number), key=lambda s: s.rank)
        done = {s.step for s in ledger.steps if s.generation == number}
        cut = ledger.cuts.get(number)
        fields = formed.get(number, {})
        result.append(
            Generation(
                generation=number,
                cause=str(fields.get("cause", "unknown")),
                reason=str(fields.get("reason", "")),
                nodes=tuple(dict.fromkeys(s.node for s in starts)),
                first_step=min(s.step for s in starts),
                last_step=max(done, default=None),
                pause_s=pauses.get(number),
                recomputed_steps=sum(1 for step in done if cut is not None and step >= cut),
            )
        )
    return tuple(result)


def samples_of(ledger: RunLedger, train_samples: int, epochs: int) -> tuple[EpochSamples, ...]:
    """The sample counts of every epoch."""
    result = []
    for epoch in range(epochs):
        seen = ledger.coverage(train_samples, epoch)
        result.append(
            EpochSamples(
                epoch=epoch,
                once=seen.once,
                twice=len(seen.twice_or_more),
                never=len(seen.never),
            )
        )
    return tuple(result)


def _where(node: str, at: JobPosition | None) -> str | None:
    if at is None:
        return None
    return f"{node} at step {at.step} in epoch {at.epoch}, generation {at.generation}"


def _failed_nodes(exit_codes: dict[str, int | None]) -> Iterable[str]:
    for node, code in exit_codes.items():
        if node != VICTIM and code != 0:
            yield f"{node} ended with {code}, not 0"


def _failed_plan(generations: Sequence[Generation], plan: DemoPlan) -> Iterable[str]:
    if plan.killed_at is None:
        yield f"the job ended before {VICTIM} was killed"
        return
    if plan.joined_at is None:
        yield f"the job ended before {ADDED} could be started"
        return
    worked = [g for g in generations if g.last_step is not None]
    smaller = [g for g in worked if g.generation > plan.killed_at.generation]
    if not any(VICTIM not in g.nodes and ADDED not in g.nodes for g in smaller):
        yield f"no generation trained without {VICTIM} and before {ADDED}"
    if not any(ADDED in g.nodes and len(g.nodes) == MAX_NODES for g in smaller):
        waited = f"{DEMO_PATIENCE_S:.0f} s"
        yield f"no generation trained with {ADDED}: it did not join within {waited}"


def _failed_samples(ledger: RunLedger, train_samples: int, epochs: int) -> Iterable[str]:
    try:
        ledger.assert_exactly_once(train_samples, epochs)
        ledger.assert_one_world_at_a_time()
    except LedgerError as error:
        yield str(error)


def _failed_weights(ledger: RunLedger) -> Iterable[str]:
    try:
        ledger.final_hash()
    except LedgerError as error:
        yield str(error)


def _failed_accuracy(accuracy: float | None) -> Iterable[str]:
    if accuracy is None:
        yield "no node reported the test accuracy"
    elif accuracy < ACCURACY_NEEDED:
        yield f"test accuracy {accuracy:.2%} is below {ACCURACY_NEEDED:.0%}"
