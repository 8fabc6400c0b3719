"""``run.once``: work of all ranks between two steps, such as an evaluation, a save or a log.

A unit of work is complete once its function has returned on all ranks: then its changes are added
to the boundary of the last step, and the job's state records the unit. A fault before that undoes
the changes, and the call is made again; after it, calls for the same unit are skipped.

A unit is known by its name and its place in training: how many calls of ``run.retry``, steps,
passes and epochs were before it, and which of the calls with this name it is there. Where the
training function is called again and has not reached the loop in which it resumes, calls are past:
everything before the loop has happened. A script that decides by its state which work is due makes
such calls, too; it names the place itself (``at=``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.errors import TrainingError
from elastic.groups.collectives import all_sum
from elastic.hangs.page import Phase, phases
from elastic.telemetry.log import get_logger
from elastic.train.checks import state_of_place
from elastic.train.copies import copied
from elastic.train.hooks import Hook
from elastic.train.loop import OWN_LOOP, StepLoop
from elastic.train.recovery import Bootstrap
from elastic.train.sampler import derive_seed, seed_all
from elastic.train.session import Session
from elastic.train.state import require_storable

_UNIT = 0x6F6E6365  # for random numbers in units, which are the same on all ranks
_AFTER = 1  # and for those of the script after them

At = int | str
"""A place that the script names."""
_Place = list[int]  # calls of run.retry, steps, passes, epoch, and calls of run.once here


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit. In the job's state, a list of these values."""

    at: Any  # At | _Place
    value: Any  # that the function has returned
    parts: list[list[Any]]  # of the state that it has changed
    number: int  # of all units of the job, from 0
    before: Sequence[list[Any]] = ()  # names in run.state that it has changed, and earlier values


class Units(Hook):
    """Work between steps. One per process. ``restart_timer``: excludes it from the next step's
    time."""

    def __init__(
        self,
        session: Session,
        bootstrap: Bootstrap,
        loop: StepLoop,
        restart_timer: Callable[[], None],
    ) -> None:
        self._session = session
        self._job = session.job
        self._progress = session.progress
        self._current = session.current
        self._lifecycle = session.lifecycle
        self._bootstrap = bootstrap
        self._loop = loop
        self._restart_timer = restart_timer
        self.is_running = False
        # Calls at a place, by name, in this call of the training function.
        self._calls: dict[str, _Place] = {}
        self._interrupted: tuple[str, int] | None = None  # a unit's name, and the step after it
        # Of calls before the first step in this call of the training function: a name, and the
        # entries of run.state by which the script names its place. Not of calls after the place
        # where it resumes: from there on, a fault repeats what has changed the entries.
        self._named: dict[str, dict[str, object]] | None = {}

    def begin_attempt(self) -> None:
        """Called before each call of the training function."""
        self._calls.clear()
        self._named = {}

    def run(self, name: str, function: Callable[[], Any], at: At | None) -> Any:
        """Complete a unit on all ranks, unless it is complete. Returns the function's value."""
        if self.is_running:
            return function()  # a part of the unit that calls it
        self._loop.end_left_loop_before_work()
        self._bootstrap.enter_loop()
        if self._current.step is not None or self._current.accumulation.since is not None:
            return self._in_step(function)
        self._loop.end_call_if_over()
        if self._progress.is_past_end and not self._job.units.get(name):
            return self._in_step(function)  # as before: what it changes is undone at the end
        if self._progress.has_passed_place:
            self._named = None
        named = {} if at is None or self._named is None else state_of_place(self._job.user)
        moved = {key: value for key, value in named.items() if self._job.user[key] != value}
        record = self._finished(name, at)
        if record is None:
            with self._progress.surroundings.keeping():
                record = self._complete(name, function, at)
        elif self._session.strategy.can_roll_back:
            self._progress.replay_unit(record.parts)
        if self._named is not None:  # the work itself may change what names it
            self._named[name] = {key: self._job.user.get(key) for key in named} | moved
        if self._interrupted is not None and self._interrupted[0] == name:
            self._interrupted = None
        # Random numbers after it are the same whether it was skipped or not.
        seed_all(derive_seed(self._job.seed, _UNIT, record.number, _AFTER))
        return copied(record.value)

    def _in_step(self, function: Callable[[], Any]) -> Any:
        """Work that is a part of the current step. Where its loop was left, it draws the same
        random numbers on all ranks, as between steps."""
        is_left, progress = self._current.inside is None, self._job.progress
        if is_left:
            seed_all(derive_seed(self._job.seed, _UNIT, progress.units))
        value = function()
        self._barrier()  # otherwise a rank may commit the step, and another one die in this work
        if is_left:
            seed_all(derive_seed(self._job.seed, _UNIT, progress.units, _AFTER))
            progress.units += 1
        return value

    # -- which units are complete -------------------------------------------------------------

    def _finished(self, name: str, at: At | None) -> UnitRecord | None:
        """The record of the unit that this call means; None if it is to be done."""
        records = [UnitRecord(*each) for each in self._job.units.get(name, [])]
        if self._progress.is_in_past_call:
            return records[-1] if records else UnitRecord("", None, [], -1)
        if at is not None:
            return next((each for each in records if each.at == at), None)
        progress = self._job.progress
        here = [progress.calls, progress.step, progress.passes, progress.epoch]
        records = [each for each in records if isinstance(each.at, list)]
        if records and self._progress.is_before_place:
            last = records[-1]
            if progress.place != OWN_LOOP:
                return last  # everything before the loop has happened
            if last.at[:2] == here[:2]:
                here = last.at[:-1]  # the pass that it came before may have begun
        before = self._calls.get(name, [])
        place = [*here, before[-1] + 1 if before[:-1] == here else 0]
        self._calls[name] = place
        if not records or place > records[-1].at:
            return None
        return next((each for each in records if each.at == place), records[-1])

    # -- a unit -------------------------------------------------------------------------------

    def _complete(self, name: str, function: Callable[[], Any], at: At | None) -> UnitRecord:
        job, progress = self._job, self._job.progress
        place = self._calls[name] if at is None else at
        self._loop.call_back_again()
        # On its way to a boundary's place, the function may have initialised weights again.
        self._progress.undo_before_place()
        self._lifecycle.synchronize()
        is_recorded = self._session.strategy.can_roll_back
        self._progress.replay_units()
        self._progress.script_has_run()
        state = {}
        if is_recorded:
            self._progress.begin_unit()
            state = copied(job.user)
        number, step = progress.units, progress.step
        seed_all(derive_seed(job.seed, _UNIT, number))
        self._interrupted, self.is_running = (name, step), True
        before = phases.enter(Phase.EVALUATION)
        try:
            value = function()
            self._loop.end_left_loop()
            if progress.step != step or self._current.step is not None:
                raise _trains(name)
            require_storable(f"run.once({name!r}): the value of its function", value)
            job.check_user()
            self._lifecycle.synchronize()
            self._barrier()
        finally:
            self.is_running = False
            phases.enter(before)

        def note(parts: list[list[Any]]) -> None:
            progress.units += 1
            # Calls of one place are distinguished by the record of each; one suffices of any other.
            changed = [name for section, name in parts if section == "state"]
            before = [[each, state[each]] if each in state else [each] for each in changed]
            kept = []
            for each in job.units.get(name, []):
                if isinstance(place, list) and _is_at_step_of(each[0], place):
                    kept.append(each)
                elif each[3] >= progress.units_before:
                    names = {earlier for earlier, *_ in each[4]}
                    before = [*each[4], *(own for own in before if own[0] not in names)]
            job.units[name] = [*kept, [place, copied(value), parts, number, before]]

        if is_recorded:
            self._progress.end_unit(note)
        else:
            note([])
        self._restart_timer()
        return UnitRecord(*job.units[name][-1])

    def _barrier(self) -> None:
        if self._lifecycle.world.size > 1:
            with self._lifecycle.replica.whole():
                all_sum([1.0])

    def begin(self, number: int) -> None:
        """See :class:`Hook`. Warns if a fault has interrupted a unit, and the script continues
        without it. Raises TrainingError if the script has changed by what it names one."""
        named, self._named = self._named or {}, None
        for name, state in named.items():
            changed = [key for key, value in state.items() if self._job.user.get(key) != value]
            if changed:
                raise _moved(name, changed[0])
        if self._interrupted is not None and number >= self._interrupted[1]:
            (name, step), self._interrupted = self._interrupted, None
            get_logger().warning(
                "run.once(%r) was interrupted after %d steps, and was not called again before step "
                "%d: a loop over batches resumes with the next batch. Call it in a function of "
                "run.after_step, or before the loop, with at=",
                *(name, step, number),
            )


def _is_at_step_of(place: Any, other: Any) -> bool:
    return isinstance(place, list) and place[:2] == other[:2]


def _moved(name: str, key: str) -> TrainingError:
    return TrainingError(
        f"run.once({name!r}, …, at=…) names its place by run.state[{key!r}], which has changed "
        "before the first step: after a fault the function would name another place, and repeat "
        "the work",
        hint=f"run.once({name!r}, function) without at=: before a loop that resumes it is skipped",
    )


def _trains(name: str) -> TrainingError:
    return TrainingError(
        f"the function of run.once({name!r}) has trained a step",
        hint="run.once is for work between steps, such as an evaluation: train in the function of "
        "run.retry",
    )
