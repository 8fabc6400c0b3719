"""The part of ``run`` that is about what people see: metrics, progress and profiles."""

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
    """What :class:`~elastic.training.run.Run` inherits."""

    def __init__(self, metrics: MetricsLog, profiler: StepProfiler, scope: Scope) -> None:
        self._metrics = metrics
        self._scope = scope
        self._profiler = profiler

    def log(self, values: Mapping[str, Loggable] | None = None, /, **named: Loggable) -> None:
        """Log numbers for the present step: ``run.log(loss=loss, lr=lr)``.

        Or ``run.log({"train/loss": loss})``. Call it on all ranks: those of rank 0 are written,
        and if another rank becomes rank 0 it continues with its own. They are the values of one
        rank; ``run.log(**run.mean(len(x), loss=loss))`` logs the mean over all ranks. A tensor
        needs one element; one on a GPU is read later, and no step waits for it. Steps that are
        done again replace what was logged for them. See docs/how-to/metrics.md.

        Raises ConfigError for what is not a number.
        """
        self._metrics.log({**values, **named} if values else named)

    def log_to(self, *writers: MetricsWriter) -> None:
        """Write what is logged there, and not to the default TensorBoard folder.

        :class:`elastic.TensorBoard`, or any object with the three methods of
        :class:`~elastic.training.observers.writer.MetricsWriter`. Call it on all ranks, before
        :meth:`log`: later it raises TrainingError.
        """
        for writer in writers:
            self._metrics.add_writer(writer)

    def plan_steps(self, total: int) -> None:
        """Say how many optimizer steps the job makes in all: ``run.plan_steps(10_000)``.

        For people: the progress line and `elastic status` then know the time that is left. It ends
        nothing. `run.epochs` says it by itself; call this where the script counts on its own, or
        trains with :meth:`begin` and :meth:`commit`. The last call counts. Raises ConfigError for
        what is no positive integer.
        """
        if type(total) is not int or total < 1:
            raise ConfigError(
                f"run.plan_steps({total!r}) is no number of steps",
                hint="the optimizer steps of the whole job, those before a resume included: "
                "run.plan_steps(10_000)",
            )
        self._scope.total_steps = total
        phases.plan_steps(total)

    def profile(self, steps: int | range, *, ranks: Sequence[int] = ()) -> None:
        """Profile the next ``steps`` steps, or those numbered by a range, with torch.profiler.

        Each rank, or each of ``ranks``, writes a trace
        ``gGENERATION-stepSTEP-rankRANK.pt.trace.json`` into ``ELASTIC_PROFILES``, by default
        ``profiles`` in the folder of journals, for Perfetto or TensorBoard. It begins and ends
        between two steps; if the world ends before, with those that were complete. `elastic
        profile` does the same from outside. Call it before :meth:`retry`: in the function that
        retry calls it would profile again after each recovery.

        Raises:
            ConfigError: not 1 to 10,000 steps in a row.
            TrainingError: a profile is under way.
        """
        if not self._profiler.ask(request_of(steps, tuple(ranks))):
            raise TrainingError(
                "run.profile() while another profile is under way, or asked for",
                hint="one at a time: call it when that has ended",
            )
