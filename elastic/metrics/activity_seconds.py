"""Time of a node's workers by activity: approximate counters; `elastic report` is exact.

``elastic report`` reads complete journals, and knows afterwards which steps were discarded and
which world a window began in. A counter cannot be corrected: repeated steps stay productive here,
and unreported time of a killed worker is missing.
"""

from __future__ import annotations

from elastic.clock import Clock
from elastic.events import RankTimes, Recovered
from elastic.metrics import table
from elastic.metrics.tally import Tally
from elastic.telemetry.activities import Activity

_LAPS = (
    ("leave_s", Activity.ABORT),
    ("wait_s", Activity.RENDEZVOUS),
    ("paused_s", Activity.WAITING_FOR_NODES),
    ("build_s", Activity.REBUILD),
    ("agree_s", Activity.STATE_TRANSFER),
    ("wrap_s", Activity.REBUILD),
)
_WHOLLY = (
    ("data_s", Activity.DATA),
    ("checkpoint_s", Activity.CHECKPOINT),
    ("evaluation_s", Activity.EVALUATION),
)


class ActivitySeconds:
    """The activity counters of one node. Called on one thread."""

    def __init__(self, tally: Tally, clock: Clock) -> None:
        self._tally = tally
        self._clock = clock
        self._started_s: float | None = None  # when workers were last started
        self._seen: set[int] = set()  # pids whose start-up was counted
        self._first_steps: dict[int, tuple[float, int]] = {}  # by pid: time in them, and how many

    def workers_start(self) -> None:
        """Record a start of workers: time until their first step is start-up."""
        self._started_s = self._clock.monotonic()

    def on_times(self, pid: int, times: RankTimes) -> None:
        """Record a window of a worker that ends now."""
        if pid not in self._seen:
            self._seen.add(pid)
            if self._started_s is not None:
                began_s = self._clock.monotonic() - times.duration_s
                self._add(Activity.STARTUP, began_s - self._started_s)
        for field, activity in _WHOLLY:
            self._add(activity, getattr(times, field))
        # A window that ends with a fault has an unfinished step, and the time until that
        # was detected.
        ended_by_fault = times.ended == "fault"
        self._add(Activity.DETECTION if ended_by_fault else Activity.SHUTDOWN, times.open_s)
        if times.ended == "first-step":
            self._first_steps[pid] = times.productive_s, times.steps
            return
        self._split_first(pid, times)
        self._add(Activity.PRODUCTIVE, times.productive_s)

    def _split_first(self, pid: int, usual: RankTimes) -> None:
        """Count the first step in a world as productive for the usual duration of a step."""
        first_s, steps = self._first_steps.pop(pid, (0.0, 0))
        step_s = usual.productive_s / usual.steps if usual.steps else 0.0
        productive_s = min(first_s, step_s * steps)
        self._add(Activity.PRODUCTIVE, productive_s)
        self._add(Activity.FIRST_STEP, first_s - productive_s)

    def on_recovered(self, event: Recovered) -> None:
        """Record that a worker continues after a change of the world."""
        for field, activity in _LAPS:
            self._add(activity, getattr(event, field))

    def forget(self, pid: int) -> None:
        """Forget a worker that has ended."""
        first_s, _ = self._first_steps.pop(pid, (0.0, 0))
        self._add(Activity.FIRST_STEP, first_s)
        self._seen.discard(pid)

    def _add(self, activity: Activity, seconds: float) -> None:
        if seconds > 0:
            self._tally.add(table.WORKER_SECONDS, seconds, activity=activity.value)
