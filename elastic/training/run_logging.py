"""The methods of ``run`` for metrics, progress and profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.errors import ConfigError, TrainingError
from elastic.hangs.phases import phases
from elastic.training.loop.scope import Scope
from elastic.training.observers.metrics_log import MetricsLog
from elastic.training.observers.profiling import StepProfiler, request_of
from elastic.training.observers.values import Loggable
from elastic.training.observers.writer import MetricsWriter


class RunLogging:
    """Base class of :class:`~elastic.training.run.Run`: metrics, progress and profiles."""

    def __init__(self, metrics: MetricsLog, profiler: StepProfiler, scope: Scope) -> None:
        self._metrics = metrics
        self._scope = scope
        self._profiler = profiler

    def log(self, values: Mapping[str, Loggable] | None = None, /, **named: Loggable) -> None:
        """Log numbers for the current step: ``run.log(loss=loss, lr=lr)``.

        Or ``run.log({"train/loss": loss})``. Call it on all ranks: only rank 0's values are
        written, and a rank that becomes rank 0 continues with its own.
        ``run.log(**run.mean(len(x), loss=loss))`` logs the mean over all ranks. A tensor must have
        one element; on a GPU it is read later, and no step waits for it. Repeated steps replace
        their values. See docs/how-to/metrics.md.

        Raises ConfigError for a value that is not a number.
        """
        self._metrics.log({**values, **named} if values else named)

    def log_to(self, *writers: MetricsWriter) -> None:
        """Write logged values to these writers instead of the default TensorBoard folder.

        :class:`elastic.TensorBoard`, or any object with the three methods of
        :class:`~elastic.training.observers.writer.MetricsWriter`. Call it on all ranks, before
        :meth:`log`: later it raises TrainingError.
        """
        for writer in writers:
            self._metrics.add_writer(writer)

    def plan_steps(self, total: int) -> None:
        """Set the total number of optimizer steps of the job: ``run.plan_steps(10_000)``.

        The progress line and `elastic status` then show the remaining time. Training does not end
        after these steps. `run.epochs` sets the total itself; call this if the script counts steps,
        or trains with :meth:`begin` and :meth:`commit`. The last call applies. Raises ConfigError
        for anything but a positive integer.
        """
        if type(total) is not int or total < 1:
            raise ConfigError(
                f"run.plan_steps({total!r}) is not a valid step count",
                hint="pass the number of optimizer steps of the whole job, including steps before "
                "a resume: run.plan_steps(10_000)",
            )
        self._scope.total_steps = total
        phases.plan_steps(total)

    def profile(self, steps: int | range, *, ranks: Sequence[int] = ()) -> None:
        """Profile the next ``steps`` steps, or a range of step numbers, with torch.profiler.

        Each rank, or each of ``ranks``, writes a trace
        ``gGENERATION-stepSTEP-rankRANK.pt.trace.json`` into ``ELASTIC_PROFILES``, by default
        ``profiles`` in the journal folder, for Perfetto or TensorBoard. It begins and ends between
        two steps; if the world ends earlier, it contains the completed steps. `elastic profile`
        does the same from outside. Call it before :meth:`retry`: in the function that retry calls,
        it would profile again after each recovery.

        Raises:
            ConfigError: ``steps`` is not 1 to 10,000 consecutive steps.
            TrainingError: another profile is running or requested.
        """
        if not self._profiler.request(request_of(steps, tuple(ranks))):
            raise TrainingError(
                "run.profile() was called while another profile is running or requested",
                hint="call it after the other profile has ended",
            )
