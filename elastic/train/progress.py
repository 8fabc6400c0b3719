"""How far this rank is, and what ranks agree on before they continue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from elastic.errors import SYSTEM_CLOCK, Clock, TrainingError
from elastic.groups.collectives import all_gather_json
from elastic.link.link import IN_STEP, Heartbeat
from elastic.telemetry.log import get_logger
from elastic.train.current import CurrentStep
from elastic.train.optimizers import OptimizerWatch
from elastic.train.rollback import Rollback, StepCopies
from elastic.train.state import JobState
from elastic.train.step import Progress
from elastic.train.surroundings import Surroundings
from elastic.tuning.intervals import LINK_HEARTBEAT_S

# ----------------------------------------------------------------------------
# Selects the rank with whose state a new world continues.
#
# docs/explanation/protocol.md, section 6, "Agreement".
#
# Every rank reports its position; the lowest of the most advanced ranks is the source. The
# generation of the last agreement is compared first: if a rank completed a step alone in an old
# generation, and the others repeated that step before it returns, it has the same step count but
# different weights.


@dataclass(frozen=True)
class Tag:
    """The position of a rank's weights. Equal tags mean equal weights."""

    generation: int  # in which all ranks last agreed
    step: int  # steps committed since the job began
    passes: int = 0  # over loaders, begun since the job began
    callbacks: int = 0  # outstanding run.after_step callbacks of the last committed step
    units: int = 0  # of work between steps, finished since the job began
    calls: int = 0  # of run.retry, completed since the job began


@dataclass(frozen=True)
class RankState:
    """One rank's contribution to an agreement."""

    nonce: str  # of the world that the rank is in
    tag: Tag | None  # None: joining, or its weights belong to no step
    begun: bool = False  # whether it is inside a step
    is_torn: bool = False  # it has trained, but its weights no longer belong to a step
    retries: int = 0  # completed calls of run.retry
    returned: int = 0  # calls whose function has returned on this rank, with all steps committed


@dataclass(frozen=True)
class Agreement:
    """The state with which all ranks of the world continue."""

    source: int | None  # the rank, or a replica's first rank, that has the state
    tag: Tag | None
    receivers: tuple[int, ...]  # ranks that need the source's weights
    is_torn: bool = False  # some rank's weights are neither the initial ones nor of a step
    retries: int = 0  # calls of run.retry that some rank has completed
    returned: int = 0  # calls whose function has returned on a rank with the source's state
    begun: bool = False  # a rank with the source's state had begun the next step
    # Replicas with that state, the source's first. Derived from the other fields.
    holders: tuple[int, ...] = field(default=(), compare=False)

    @property
    def is_fresh(self) -> bool:
        """Whether no rank has a state, so that a checkpoint or the initial state is used."""
        return self.source is None


def agree(state: RankState, replica_size: int = 1) -> Agreement:
    """Compare all ranks' states; the result is the same on every rank.

    Raises TrainingError if the group joins ranks of different worlds.
    """
    return choose([_parse(data) for data in all_gather_json(_to_json(state))], replica_size)


def choose(states: list[RankState], replica_size: int = 1) -> Agreement:
    """Choose the lowest rank with the greatest tag; ranks with another tag are receivers.

    With replicas of several ranks: the first rank of the lowest replica whose ranks all have that
    tag. A replica whose ranks differ has no state, because a part of a state is useless.
    """
    if len({s.nonce for s in states}) > 1:
        raise TrainingError(
            f"ranks of different worlds are in one group: {[s.nonce for s in states]}",
            hint="this is a bug: report it with the journals of all nodes",
        )
    firsts = range(0, len(states), replica_size)
    by_replica = [_of_replica(states[first : first + replica_size]) for first in firsts]
    known = [(replica, s) for replica, s in enumerate(by_replica) if s.tag is not None]
    is_torn = any(s.is_torn for s in states)
    retries = max(s.retries for s in states)
    if not known:
        return Agreement(None, None, (), is_torn, retries)
    source, best = max(known, key=lambda item: (*_order(item[1]), -item[0]))
    others = tuple(
        rank for rank in range(len(states)) if by_replica[rank // replica_size].tag != best.tag
    )
    holders = tuple(replica for replica, s in known if _order(s) == _order(best))
    returned = max(s.returned for s in states if s.tag is not None and _order(s) == _order(best))
    return Agreement(
        source * replica_size, best.tag, others, is_torn, retries, returned, best.begun, holders
    )


def _of_replica(states: list[RankState]) -> RankState:
    """The state of a replica's first rank, without a tag unless its ranks are at one step."""
    tags = [s.tag for s in states if s.tag is not None]
    if len(tags) < len(states):
        return replace(states[0], tag=None)
    # One rank may have begun the next pass while another one evaluates.
    passes = min(tag.passes for tag in tags)
    distinct = {replace(tag, passes=passes) for tag in tags}
    return replace(states[0], tag=distinct.pop() if len(distinct) == 1 else None)


def _order(state: RankState) -> tuple[int, ...]:
    assert state.tag is not None
    tag = state.tag
    at = tag.generation, tag.step, tag.calls, tag.passes, -tag.callbacks, tag.units
    return (*at, state.begun)


def _to_json(state: RankState) -> dict[str, Any]:
    tag = state.tag
    encoded = None
    if tag is not None:
        encoded = list(dataclasses.astuple(tag))
    return {**vars(state), "tag": encoded}


def _parse(data: dict[str, Any]) -> RankState:
    tag = data["tag"]
    parsed = None
    if tag is not None:
        parsed = Tag(*map(int, tag))
    return RankState(
        str(data["nonce"]),
        parsed,
        bool(data["begun"]),
        bool(data["is_torn"]),
        int(data["retries"]),
        int(data["returned"]),
    )


# ----------------------------------------------------------------------------
# Compares the learning rates of a repeated step, to detect a script that miscounts steps.
#
# If a script computes learning rates from a local counter, the counter restarts when ``run.retry``
# calls its function again. No error would occur.

Rates = dict[str, list[Any]]


def rates_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> Rates:
    """The learning rates of each optimizer, by group."""
    return {name: [g.get("lr") for g in o.param_groups] for name, o in optimizers.items()}


class RedoneRates:
    """Compares learning rates. One per process."""

    def __init__(self) -> None:
        self._expected: Rates = {}  # rates that the script set in the interrupted step
        self._step: int | None = None
        self._has_warned = False

    def interrupted(
        self, step: int, stepped: Collection[str], was: Rates, committed: Rates
    ) -> None:
        """Record the rates at the interruption of a step.

        ``was``: the rates in step number ``step``; ``committed``: the restored rates of the last
        commit; ``stepped``: the optimizers that had finished the step.
        """
        self._step = step
        self._expected = {
            name: rates
            for name, rates in was.items()
            if name not in stepped and rates != committed.get(name)
        }

    def stepping(self, step: int, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Warn once if an optimizer is about to step at a different rate than before."""
        if step != self._step or self._has_warned:
            return
        expected = self._expected.pop(name, None)
        rates = [group.get("lr") for group in optimizer.param_groups]
        if expected is None or rates == expected:
            return
        self._has_warned = True
        get_logger().warning(
            "step %d is repeated with lr=%s for %s (previously lr=%s): a local counter in the "
            "function that run.retry calls was reset. "
            "Keep the count in run.state, or track a scheduler: "
            "run.track(optimizer=optimizer, scheduler=scheduler)",
            step,
            rates[0],
            name,
            expected[0],
        )


# ----------------------------------------------------------------------------
# Tracks the boundary between two steps to which a rank's state belongs, and returns to it.
#
# A boundary belongs to a place in the script: the pass over a loader in which the next step
# begins, or which has just ended. After a recovery, the training function is called from its
# beginning, and what it changes before that place has happened before the boundary, too: initial
# weights, the ``scheduler.step()`` at the beginning of an epoch, a counter. So the boundary is
# restored again where the function reaches the place, and such changes take effect once.
#
# A function may return in a step, which then ends with it: the code after the loop belongs to that
# boundary, whose place is the end of the function. It is taken once the function has returned on
# all ranks, so that the function need not be called again. A rank that could not undo the step
# commits it before: then the function is called again, and what it changes is undone at its end.

END = "run.retry"  # the place at the end of the function, which has returned on all ranks
RETURNED = "run.retry, returned"  # the same, where it has returned on some ranks


class RankProgress:
    """The step of this rank's weights, and the rollback to the last commit. One per process."""

    def __init__(self, job: JobState, watch: OptimizerWatch, current: CurrentStep) -> None:
        self._job = job
        self._optimizer_watch = watch
        self._current = current
        self.step_copies = StepCopies.AUTO
        self.has_committed = False  # a step was committed in this process
        self._rollback: Rollback | None = None
        self._replaced: Rollback | None = None  # of the objects that the script has replaced
        self._is_fresh = False  # the script has not run since the last snapshot
        self._is_torn = False  # the weights are neither the initial ones nor of a step
        self.retries = 0  # calls of run.retry that this rank has completed
        self.retries_of_others = 0  # the maximum over this world's ranks at its beginning
        # Calls that a job which resumes from a checkpoint had completed, and this script omits.
        self._omitted = 0
        self._returned = 0  # calls whose function has returned here or, by agreement, elsewhere
        self._had_returned = False  # before the last return of the function
        # The boundary is that before the process's last step, which ended with the script.
        self.keeps_boundary = False
        self.tag: Tag | None = None  # of this rank's weights
        self.begun = False  # a step was begun
        self._place = ""  # of the boundary with which this world began
        self.is_before_place = False  # the function runs towards the boundary's place
        self.has_passed_place = False  # it has been there, and continues from there
        self._is_before_loops = False  # the function has begun no pass since the world began
        self.surroundings = Surroundings(job)
        self._is_step_missing = False  # some rank had begun the step after the boundary
        # Names in run.state with values from before the units of this boundary.
        self._shown: set[str] = set()
        self._rates = RedoneRates()
        watch.on_update = self._rates.stepping

    @property
    def rollback(self) -> Rollback:
        """The rollback, created at its first use, once the job's objects are registered."""
        if self._rollback is None:
            self._rollback = self._optimizer_watch.rollback = Rollback(
                self._job, self._optimizer_watch.tracked, self.step_copies
            )
            if (replaced := self._replaced) is not None:
                self._rollback.adopt(replaced.snapshot)
                self._replaced = None
        return self._rollback

    @property
    def is_catching_up(self) -> bool:
        """Whether other ranks have completed this rank's current call of run.retry: there is
        nothing to train in it, and no peer to save or synchronize with."""
        return self.retries < self.retries_of_others

    @property
    def is_in_past_call(self) -> bool:
        """Whether the job had completed this rank's current call of run.retry before it resumed
        from a checkpoint, or other ranks have now."""
        return self.is_catching_up or self.retries + self._omitted < self._job.progress.calls

    @property
    def has_returned(self) -> bool:
        """Whether this rank's current call of run.retry has nothing left to train: its function
        has returned, here or on another rank, and all steps are committed.

        Another call of the function would train another step if it compares its count of steps
        after each step only, or would never end.
        """
        return self.retries < max(self.retries_of_others, self._returned)

    @property
    def is_past_end(self) -> bool:
        """Whether the function runs again although it has already returned, with its last step."""
        return self.is_before_place and self._place in (END, RETURNED)

    @property
    def is_over(self) -> bool:
        """Whether the function has returned on all ranks of an earlier world, with its last step:
        it need not be called again. Not where the job has resumed from a checkpoint: another
        version of the script may train longer."""
        return self.is_before_place and self._place == END and self.has_returned

    def function_returned(self) -> None:
        """Record that the training function has returned on this rank. Its last step may not be
        committed yet: it ends with the function."""
        self._had_returned = self.has_returned
        self._returned = max(self._returned, self.retries + 1)
        if self.is_past_end:
            self.is_before_place = self._is_step_missing = False
            self._restore_boundary()

    def reach_end(self, *, on_all_ranks: bool) -> None:
        """The function's last step, if it is not committed yet, is committed at its end."""
        progress = self._job.progress
        if not self.is_in_past_call and progress.place not in (END, RETURNED):
            progress.place = END if on_all_ranks else RETURNED

    # -- while training -----------------------------------------------------------------------

    def reach(self, place: str) -> bool:
        """The script has reached ``place``. If the state was restored at this place, undo what the
        script has changed since, and return True."""
        if not self.is_before_place or self._place != place:
            return False
        self.is_before_place = self._is_step_missing = False
        self.has_passed_place = True
        self._reach_loop()
        given = rates_of(self._optimizer_watch.tracked)
        self._restore_boundary()
        restored = rates_of(self._optimizer_watch.tracked)
        if given != restored:
            get_logger().info(
                "lr=%s, which was set before the loop, is replaced by that of step %d, lr=%s: the "
                "loop resumes there. To change rates of a resumed job, set them in run.on_world",
                *(list(given.values()), self._job.progress.step, list(restored.values())),
            )
        return True

    def undo_before_place(self) -> None:
        """Undo what the script has changed on its way to the boundary's place: nothing of it
        counts."""
        if self.is_before_place:
            self._restore_boundary()

    def _restore_boundary(self) -> None:
        self._shown.clear()
        if not self.rollback.restore():
            raise TrainingError(
                f"weights were changed after they were restored for step {self._job.progress.step},"
                " and there is no copy of them: run.retry calls its function again in each new "
                "world",
                hint="initialize weights, or load pretrained weights, before run.retry(train), not "
                "in train",
            )

    def begin_pass(self, place: str, *, is_known: bool = False) -> None:
        """The script begins a pass over a loader, or a step of its own loop. ``is_known``: it has
        reached this pass before, and what it has changed since does not count either."""
        progress = self._job.progress
        if is_known:
            self._restore_boundary()
        elif not self.reach(place):
            self._reach_loop()
            self.script_has_run()
            if self._rollback is not None:
                self._rollback.script_has_run()
            progress.passes += 1
            progress.units_before = progress.units
        progress.place = place

    def _reach_loop(self) -> None:
        """What the script sets before its first loop, it sets in each call of the function."""
        self.surroundings.reach_loop()
        if self._is_before_loops:
            self._is_before_loops = False
            for attributes in self._job.attributes().values():
                attributes.accept()

    def before_step(self, *, can_undo: bool, with_copies: bool = False) -> None:
        """Take the boundary before a step, outside of an accumulation; only note the weights if the
        step cannot be undone. ``with_copies``: it will have to be undone completely."""
        self._omitted = max(0, self._job.progress.calls - self.retries)
        self.replay_units()
        if self.is_past_end:
            self.is_before_place = False  # another version of the script trains longer
        if not can_undo:
            self.rollback.note_weights()
        elif with_copies and not self.rollback.has_copies:
            self._take(with_copies=True)
        elif not self._is_fresh:
            self._take()

    def enter_world(self) -> None:
        """Begin a world at the boundary to which the state of all ranks belongs."""
        self._place = self._job.progress.place
        self.is_before_place = bool(self._place)
        self.has_passed_place = False
        self._is_before_loops = True
        # Only this copy can undo what the script changes before it reaches the boundary's place.
        self.rollback.take(with_copies=not self._job.is_rebuilt)
        self._is_fresh = True
        self._shown.clear()
        if self.is_before_place and self._place in self._job.loaders:
            self._shown = self._job.show_before_units()

    def end_function(self) -> None:
        """Called when the function has returned.

        Raises TrainingError if it has not repeated the step that a fault interrupted.
        """
        if not self.is_before_place:
            return
        if self._is_step_missing and not self._had_returned:
            raise TrainingError(
                f"step {self._job.progress.step} was interrupted, and the function that run.retry "
                "calls again has returned without it: its condition counts the step before the "
                "step's batch is requested, so the job would train one step less",
                hint="count a step at its end, not at its beginning: batch = next(batches); …; "
                'optimizer.step(); run.state["step"] += 1',
            )
        self.replay_units()
        # Nothing was left to train. The code after the loop is repeated, but not initial weights.
        self.is_before_place = False
        if self.rollback.weights_have_changed:
            self.rollback.restore()

    def register_again(self) -> None:
        """Prepare for new objects that replace the job's objects of the same kind."""
        self._replaced = self._rollback
        self._rollback = self._optimizer_watch.rollback = None
        self._is_fresh = False

    def lose_state(self, *, is_saved: bool) -> None:
        """Drop this rank's state, because a part of a state is useless in another world. Unless it
        ``is_saved``, what is not sharded returns to the last boundary: a job of which nothing was
        saved yet begins with it."""
        if self._rollback is not None and not is_saved:
            self._rollback.restore()
        self.tag = None
        self._rollback = self._optimizer_watch.rollback = None
        self._is_fresh = self.begun = False

    def script_has_run(self) -> None:
        """Record that the script has run, and may have changed any object."""
        self._is_fresh = False

    def committed(self, step: tuple[int, int, int], callbacks: int = 0) -> None:
        """Commit ``step`` (number, epoch, index), which ``callbacks`` callbacks follow."""
        if not self.keeps_boundary:
            self.rollback.committed()
        self.begun = False
        self._job.progress.commits += 1
        self._job.progress.last = step
        self.called_back(callbacks)

    def called_back(self, left: int) -> None:
        """Record that ``left`` callbacks of the last committed step remain."""
        progress = self._job.progress
        progress.callbacks_left = left  # saved with the state, which lacks their changes
        self._take()

    def begin_unit(self) -> None:
        """Begin work between steps."""
        self.rollback.begin_unit()

    def end_unit(self, record: Callable[[list[list[Any]]], None]) -> None:
        """Add what the work has changed to the last boundary; see
        :meth:`Rollback.end_unit <elastic.train.rollback.Rollback>`."""
        self.rollback.end_unit(record)
        self._is_fresh = False  # the script's own changes are not part of it
        if self.tag is not None:
            self.tag = dataclasses.replace(self.tag, units=self._job.progress.units)

    def replay_unit(self, parts: list[list[Any]]) -> None:
        """Give what finished work has changed its values in the last boundary again."""
        self.rollback.restore_unit(parts)
        self._shown -= {name for section, name in parts if section == "state"}

    def replay_units(self) -> None:
        """The same for all of it that the script has not repeated since the world began."""
        if self._shown:
            self.replay_unit([["state", name] for name in sorted(self._shown)])

    def call_ended(self, *, takes_boundary: bool) -> None:
        """A call of run.retry is complete: a fault after it does not repeat its end.

        A call that other ranks have completed has no effect on this rank, which returns to the
        boundary with which it has joined: that of a later call. The same applies where the job has
        resumed from a checkpoint in a later call.
        """
        is_caught_up, is_past, progress = (
            self.is_catching_up,
            self.is_in_past_call,
            self._job.progress,
        )
        self.retries += 1
        if is_caught_up:
            self._restore_boundary()
        if is_caught_up or (is_past and self._place):
            self.is_before_place = bool(self._place)
            self.has_passed_place = False
            return
        progress.calls = max(progress.calls, self.retries + self._omitted)
        if takes_boundary:
            progress.place = ""
            self.is_before_place = False
            self._take()

    def _take(self, *, with_copies: bool = False) -> None:
        if self.keeps_boundary:
            return
        self._job.progress.units_before = self._job.progress.units
        self.rollback.take(with_copies=with_copies)
        self._is_fresh = True
        if self.tag is not None:
            self.tag = tag_of(self.tag.generation, self._job.progress)

    # -- after a fault ------------------------------------------------------------------------

    def interrupt(self, *, may_go_back: bool = True) -> None:
        """Undo the changes of the current step, and set :attr:`tag` to the boundary to which the
        state then belongs: an earlier one if the last is lost and ``may_go_back``."""
        step, watch = self._current.step, self._optimizer_watch
        rates = rates_of(watch.tracked)
        for optimizer in watch.tracked.values():
            optimizer.zero_grad(set_to_none=True)
        for module in self._job.modules.values():
            module.module.zero_grad(set_to_none=True)
        if self.tag is not None:
            self._is_fresh = False
            # The steps of an open accumulation have begun, too.
            self.begun = step is not None or self._current.accumulation.since is not None
            if self.rollback.restore() or (may_go_back and self.rollback.restore_earlier()):
                self.tag = tag_of(self.tag.generation, self._job.progress)
            else:
                self.tag, self._is_torn = None, True
        if step is not None:
            self._rates.interrupted(step.number, step.stepped, rates, rates_of(watch.tracked))
        watch.reset()
        self._job.order.sums.drop()
        self._current.drop_uncommitted()
        for module in self._job.modules.values():
            module.reduction.forget_gradients()
            module.reduction.begin(1.0)
        for earlier in self._job.earlier_gradients:
            earlier.forget()

    def roll_back(self) -> bool:
        """Return to the last boundary. Returns False if that is impossible."""
        if not self.rollback.restore():
            return False
        self._current.drop_uncommitted()
        return True

    def go_back(self) -> bool:
        """Return to a boundary before the last one. Returns False if none is kept."""
        if not self.rollback.restore_earlier(learns=False):
            return False
        self._current.drop_uncommitted()
        return True

    # -- in a new world -----------------------------------------------------------------------

    def rank_state(self, nonce: str) -> RankState:
        """This rank's contribution to the agreement of the world ``nonce``."""
        returned = self.retries if self.begun else self._returned
        return RankState(nonce, self.tag, self.begun, self._is_torn, self.retries, returned)

    def agreed_on_calls(self, agreement: Agreement) -> None:
        """Record how many calls of run.retry other ranks have completed or left, and whether a
        step was interrupted."""
        self.retries_of_others, self._returned = agreement.retries, agreement.returned
        self._is_step_missing = agreement.begun

    def can_spare_weights(self, other: Tag) -> bool:
        """Whether no rank can need this rank's weights while it receives the state ``other``: they
        belong to no step, and the job is past its initial state."""
        return self.tag is None and other.step > 0

    def begin_taking_over(self) -> None:
        """Mark the weights as torn before a peer's weights are received in place or applied: that
        may fail half way."""
        self.tag, self._is_torn = None, True

    def took_over(self, tag: Tag) -> None:
        """Record that a peer's weights are completely applied."""
        self.tag, self._is_torn = tag, False

    def agreed(self, tag: Tag, *, generation: int) -> None:
        """Record that all ranks of the world have the state of ``tag``."""
        self.tag = dataclasses.replace(tag, generation=generation)
        self._is_fresh, self._is_torn = False, False


def tag_of(generation: int, progress: Progress) -> Tag:
    """The position of a rank whose state is that of a boundary with this progress."""
    return Tag(
        generation,
        progress.step,
        progress.passes,
        progress.callbacks_left,
        progress.units,
        progress.calls,
    )


# ----------------------------------------------------------------------------
# Measures the duration of steps, and reports it in heartbeats.

_SMOOTHING = 0.1  # factor of exponential smoothing


class StepTimer:
    """Measures steps. One per process; written by the main thread, read by the link's thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._step_time_s = 0.0
        self._last: tuple[float, int] | None = None  # time of the last commit, and its steps
        self._steps = 1  # of the last commit

    def committed(self, step: int) -> None:
        """Record a commit after ``step`` steps of the job. It commits several if the script
        accumulates gradients over them."""
        now_s = self._clock.monotonic()
        if self._last is not None and step > self._last[1]:
            last_s, last_step = self._last
            self._steps = step - last_step
            took_s = (now_s - last_s) / self._steps
            before_s = self._step_time_s or took_s
            self._step_time_s = before_s + _SMOOTHING * (took_s - before_s)
        self._last = now_s, step

    @property
    def is_slow(self) -> bool:
        """Whether commits are at least as far apart as the link's heartbeats."""
        return self._step_time_s * self._steps >= LINK_HEARTBEAT_S

    def restart(self) -> None:
        """Exclude the time until the next commit, which is not a step's duration."""
        self._last = None

    def heartbeat(self, generation: int, job: JobState, current: CurrentStep) -> Heartbeat:
        """This worker's position in the world ``generation``."""
        return Heartbeat(
            generation=generation,
            step=job.progress.step,
            phase=IN_STEP if current.step is not None else "other",
            step_time_s=self._step_time_s,
        )
