"""The state that the page shows at one moment. Immutable: it is passed between threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.cli.observe.job_view import JobCondition, JobView

UNKNOWN = "unknown"  # in addition to JobCondition: etcd has not answered yet


@dataclass(frozen=True)
class JobEvent:
    """An event from the journals, or a change seen in etcd."""

    number: int  # per server: ascending, without gaps
    at_s: float  # Unix time
    name: str
    node: str
    generation: int | None
    step: int | None
    text: str  # one line


@dataclass(frozen=True)
class Outage:
    """A period in which etcd does not answer or denies access."""

    since_s: float  # Unix time
    reason: str


@dataclass(frozen=True)
class RunCharts:
    """Charts drawn from the journals as SVG elements, or the reason why there are none."""

    timeline: str = ""
    breakdown: str = ""
    curves: tuple[str, ...] = ()
    goodput: float | None = None
    goodput_of_s: float = 0.0  # the period that it covers
    legend: tuple[str, ...] = ()  # activities of the timeline
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """All facts of the page, at ``at_s`` of the wall clock."""

    run_id: str
    at_s: float
    view: JobView | None = None  # from etcd's last answer
    outage: Outage | None = None
    uses_etcd: bool = True
    reads_journals: bool = False
    last_known: Sequence[str] = ()  # from the journals, while etcd does not answer
    events: tuple[JobEvent, ...] = ()  # the last events, oldest first
    charts: RunCharts | None = None  # None: not drawn yet
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The state: a value of :class:`JobCondition`, or "unknown"."""
        return self.view.state.value if self.view is not None else UNKNOWN

    @property
    def is_stale(self) -> bool:
        """Whether the view is older than it should be."""
        return self.outage is not None

    @property
    def needs_attention(self) -> bool:
        """Whether the job needs attention."""
        bad = (JobCondition.FAILED, JobCondition.DOWN, JobCondition.PAUSED)
        return self.state in {condition.value for condition in bad}
