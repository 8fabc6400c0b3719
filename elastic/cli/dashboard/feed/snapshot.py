"""What the page shows at one moment. Immutable: threads hand it to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.cli.observe.job_view import JobCondition, JobView

UNKNOWN = "unknown"  # a state beside those of JobCondition: etcd has not answered yet


@dataclass(frozen=True)
class JobEvent:
    """An event of the journals, or one that etcd has shown, for people and programs."""

    number: int  # of this server: ascending, without gaps
    at_s: float  # Unix time
    name: str
    node: str
    generation: int | None
    step: int | None
    text: str  # one line


@dataclass(frozen=True)
class Outage:
    """etcd does not answer, or refuses."""

    since_s: float  # Unix time
    reason: str


@dataclass(frozen=True)
class RunCharts:
    """Drawn from the journals; SVG elements, or the reason why there are none."""

    timeline: str = ""
    breakdown: str = ""
    curves: tuple[str, ...] = ()
    goodput: float | None = None
    goodput_of_s: float = 0.0  # what it covers
    legend: tuple[str, ...] = ()  # activities of the timeline
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """All facts of the page, at ``at_s`` of the wall clock."""

    run_id: str
    at_s: float
    view: JobView | None = None  # the last that etcd has answered
    outage: Outage | None = None
    asks_etcd: bool = True
    reads_journals: bool = False
    last_known: Sequence[str] = ()  # by the journals, while etcd has not answered once
    events: tuple[JobEvent, ...] = ()  # the last ones, oldest first
    charts: RunCharts | None = None  # None: not drawn yet
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """In one word: a value of :class:`JobCondition`, or "unknown"."""
        return self.view.state.value if self.view is not None else UNKNOWN

    @property
    def is_stale(self) -> bool:
        """Whether the view is older than it should be."""
        return self.outage is not None

    @property
    def is_trouble(self) -> bool:
        """Whether somebody should look."""
        bad = (JobCondition.FAILED, JobCondition.DOWN, JobCondition.PAUSED)
        return self.state in {condition.value for condition in bad}
