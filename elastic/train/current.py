"""What is shared while a step runs: the step, its listeners, and requests to stop."""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NoReturn, Protocol

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.groups.world import World
from elastic.hangs.page import Phase, phases
from elastic.telemetry.events import RankTimes
from elastic.telemetry.journal import EventSink
from elastic.train.hooks import Hook, Left
from elastic.train.loader import ElasticLoader
from elastic.train.step import Progress, Step
from elastic.tuning.intervals import (
    STEP_TIMES_S,
)

# A main thread that was stopped for a last save sleeps in slices of this until its process ends.
HALT_SLICE_S = 1.0

# ----------------------------------------------------------------------------
# Gradient accumulation: steps whose gradients no optimizer has used yet.
#
# With ``if (i + 1) % 4 == 0: optimizer.step()``, after each of the other three iterations this
# rank holds gradients that exist nowhere else. So they are not committed: the data advances, but a
# recovery returns to the last iteration after which no tracked optimizer held gradients. Until the
# next such iteration nothing is saved and no planned change of the world takes place.


class Accumulation:
    """The iterations since the last commit."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._lengths: deque[int] = deque(maxlen=2)  # iterations of the last groups
        self._first_length = 0  # iterations of the last group that began an epoch
        self._interrupted: int | None = None  # the first step of a group to be repeated

    @property
    def since(self) -> int | None:
        """The number of the first uncommitted step; None if all are committed."""
        return self._steps[0].number if self._steps else None

    def add(self, step: Step) -> None:
        """Add a finished iteration whose gradients are still unused."""
        self._steps.append(step)

    def end(self, step: Step) -> list[Step]:
        """Optimizers have used all gradients: returns the steps to commit, ``step`` last."""
        steps = [*self._steps, step]
        self._lengths.append(len(steps))
        if not steps[0].index:
            self._first_length = len(steps)
        self._interrupted = None
        self.drop()
        return steps

    def shorter_length(self, step: Step) -> tuple[int, int] | None:
        """The iterations of the group that ``step`` ends, and of earlier groups, if the group was
        interrupted before and is shorter.

        A counter that was not reset has already counted some of the repeated batches. A longer
        group has another reason: a batch size that grows during training. So has one that begins
        an epoch as earlier ones did: of one batch, with ``if step % 4 == 0``.
        """
        length = len(self._steps) + 1
        begins = self._steps[0] if self._steps else step
        first = begins.number
        if not begins.index and length == self._first_length:
            return None
        usual = self._lengths[0] if len(set(self._lengths)) == 1 and len(self._lengths) == 2 else 1
        is_shorter = self._interrupted == first and length < usual
        return (length, usual) if is_shorter else None

    def interrupt(self, step: Step | None) -> None:
        """After a fault of the world in ``step``: the iterations will be repeated."""
        if self.since is not None:
            self._interrupted = self.since
        elif step is not None:
            self._interrupted = step.number
        self.drop()

    def take_last(self) -> Step | None:
        """Remove and return the last iteration; None if there is none."""
        return self._steps.pop() if self._steps else None

    def drop(self) -> None:
        """Drop the iterations: they are repeated, or their gradients are never used."""
        self._steps = []


# ----------------------------------------------------------------------------
# The current step, the loop that runs it, and the accumulation it belongs to.


class CurrentStep:
    """The current step. One per process; written by the step loop and by recovery, read by all.

    A loop may be left in the middle of a step, by ``break`` or by an exception. Until it is known
    which, the step is neither committed nor dropped, and the script is not inside it.
    """

    def __init__(self) -> None:
        self.step: Step | None = None  # begun, and neither committed nor dropped
        self.accumulation = Accumulation()
        self.is_committing = False  # dropped, but the last commit is still the one before it
        # The step before which this rank has announced whether it leaves its world.
        self.announced_for: int | None = None
        self._loader: ElasticLoader | None = None  # None: data that the script distributes itself
        self._left_loader: ElasticLoader | None = None  # the loop over it was left in the step
        self._is_evaluating = False  # the script has read other samples than the step's

    def begin(self, step: Step, loader: ElasticLoader | None) -> None:
        """Record that a step is passed to the script."""
        self.step, self._loader, self.announced_for = step, loader, None
        self._is_evaluating = False

    def evaluation_begins(self) -> None:
        """Record that the script reads samples of ``run.shard``. The last step of an epoch may not
        have ended: ``next(batches)`` is called for each batch, but not for the end of the data."""
        self._is_evaluating = True

    def leave(self, loader: ElasticLoader) -> None:
        """Record that the loop over ``loader`` was left in the middle, for any reason."""
        self._left_loader = loader

    def take_left_loader(self) -> ElasticLoader | None:
        """Return and forget the loader whose loop was left."""
        loader, self._left_loader = self._left_loader, None
        return loader

    @property
    def loader(self) -> ElasticLoader | None:
        """The loader of the step; None for data that the script distributes itself."""
        return self._loader

    @property
    def inside(self) -> Step | None:
        """The step that the script is in; None outside of steps."""
        return self.step if self._left_loader is None else None

    @property
    def lacks_samples(self) -> bool:
        """Whether the script is in a step that has no sample of this rank, but a filler, and has
        not read samples of an evaluation since: those count."""
        step = self.inside
        is_filled = step is not None and self._loader is not None and step.samples == 0
        return is_filled and not self._is_evaluating

    def left_step(self, loader: ElasticLoader) -> Step | None:
        """The step in which a loop over ``loader`` was left, until it is committed or dropped."""
        return self.step if self._left_loader is loader else None

    def leading(self, loader: ElasticLoader) -> tuple[ElasticLoader, Step] | None:
        """Another loader that has a current step, and the step; None if there is none."""
        step, leader = self.inside, self._loader
        if step is None or leader is None or leader is loader:
            return None
        return leader, step

    @property
    def first_number(self) -> int | None:
        """The number of the current step, or of the first step of an accumulation.

        The next step's number once this rank has announced that it stays for it; None between two
        commits otherwise. Read by the link's thread.
        """
        if (first := self.accumulation.since) is not None:
            return first
        if (following := self.announced_for) is not None:
            return following
        step = self.step
        return step.number if step is not None else None

    def drop(self) -> None:
        """End the current step."""
        self.step = self._loader = self._left_loader = None

    def drop_uncommitted(self) -> None:
        """Drop the step and the accumulated ones before it: none has taken effect."""
        step, self.announced_for = self.step, None
        self.drop()
        self.accumulation.interrupt(step)


def logged_at(current: CurrentStep, progress: Progress) -> int:
    """The step to log values for: the number of committed steps once the current one commits.

    After a loop that was left in a step, that step counts if an optimizer has stepped.
    """
    step = current.step
    # No properties are called: this runs in every step.
    if step is not None and (current._left_loader is None or step.stepped):
        return step.number + 1
    return progress.step


# ----------------------------------------------------------------------------
# Stops the main thread, so that another thread can save an unchanging state.
#
# For a process that is about to end: a thread that stops here does not continue. A step boundary
# is the best place. If none is reached in time, a signal interrupts the script in the middle of a
# step, provided that no optimizer has stepped in it.


class Place(Enum):
    """Where the main thread was stopped."""

    BOUNDARY = "between two steps: the state is that of the last commit"
    STEP = "in a step: its changes must be rolled back"
    FAILED = "an exception ended the script: changes must be rolled back, as in a step"


class Halt:
    """Requests and checks for a stop. One per process: the saving thread requests, the main thread
    checks."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.is_preempted = False  # this process was asked to leave, and does so at a boundary
        self.has_left = False  # this process has saved and is about to exit
        self._is_requested = threading.Event()
        self._may_interrupt: Callable[[], bool] | None = None
        self._unanswered_since_s: float | None = None  # an interrupt that no handler has seen
        self._saving = threading.Lock()

    # -- the thread that saves ----------------------------------------------------------------

    def request(self) -> None:
        """Request a stop at the next boundary, or when an exception ends the script."""
        self._is_requested.set()

    def wait_for_own_save(self, timeout_s: float) -> bool:
        """Wait until the main thread is not saving; False if it still is."""
        if not self._saving.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._saving.release()
        return True

    def interrupt(self, may_stop: Callable[[], bool]) -> None:
        """Make the main thread check, at its next Python instruction, whether it may stop."""
        self._may_interrupt = may_stop
        if self._unanswered_since_s is None:
            self._unanswered_since_s = SYSTEM_CLOCK.monotonic()
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

    @property
    def unanswered_s(self) -> float:
        """How long the main thread has not executed the handler of an interrupt."""
        since_s = self._unanswered_since_s
        return 0.0 if since_s is None else SYSTEM_CLOCK.monotonic() - since_s

    def freeze(self) -> None:
        """Count the main thread as stopped: an interrupt is pending, which it handles before it
        executes any more Python."""
        self._may_interrupt = lambda: True
        self.place = Place.STEP

    # -- the main thread ----------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Stop here if requested. Does not return in that case."""
        if self._is_requested.is_set():
            self._stop(Place.BOUNDARY)

    def on_signal(self) -> bool:
        """Whether :meth:`interrupt` sent this SIGTERM. Does not return if the thread stops here."""
        may_stop = self._may_interrupt
        if may_stop is None or self._unanswered_since_s is None:
            return False
        self._unanswered_since_s = None
        if may_stop():
            self._stop(Place.STEP)
        return True

    @contextmanager
    def own_save(self) -> Iterator[None]:
        """Let the main thread save, unless another thread is about to save."""
        with self._saving:
            is_requested = self._is_requested.is_set()
            if not is_requested:
                yield
        if is_requested:
            self._stop(Place.FAILED)

    def _stop(self, place: Place) -> NoReturn:
        self.place = place
        while True:  # the other thread ends the process
            SYSTEM_CLOCK.sleep(HALT_SLICE_S)


# ----------------------------------------------------------------------------
# The script's callbacks for new worlds.


class Listeners(Hook):
    """``run.on_world`` and ``run.on_main``: called for the current world and every new one."""

    def __init__(self) -> None:
        self._on_world: list[Callable[[World], object]] = []
        self._on_main: list[Callable[[], object]] = []
        self._before_attempts = (0, 0)
        self._world: World | None = None  # the current one, once its state is restored

    def on_world(self, callback: Callable[[World], object]) -> None:
        """Call ``callback`` for each world whose state is restored, including the current one."""
        self._on_world.append(callback)
        if self._world is not None:
            callback(self._world)

    def on_main(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever this rank becomes rank 0; immediately if it is."""
        self._on_main.append(callback)
        if self._world is not None and self._world.rank == 0:
            callback()

    def begin_attempt(self, *, is_again: bool) -> None:
        """Forget the callbacks that the function of ``run.retry`` registered in its previous
        call."""
        if is_again:
            of_worlds, of_main = self._before_attempts
            del self._on_world[of_worlds:]
            del self._on_main[of_main:]
        self._before_attempts = len(self._on_world), len(self._on_main)

    def enter_world(self, world: World, step: int) -> None:
        """Call the listeners: a world has begun, and its state is restored."""
        was_main = self._world is not None and self._world.rank == 0
        self._world = world
        for callback in self._on_world:
            callback(world)
        if world.rank == 0 and not was_main:
            for promote in self._on_main:
                promote()


# ----------------------------------------------------------------------------
# Writes this rank's time account to the journal every few seconds.
#
# It writes one event per window rather than per step, so a step costs only a few stores. The
# phases come from :data:`elastic.hangs.page.phases`; :mod:`elastic.telemetry.goodput` reads the
# events.

# Activities that are never part of a step. Others are part of it once it is committed.
_OUTSIDE_STEPS = (Phase.DATA, Phase.CHECKPOINT, Phase.EVALUATION)


class PhaseTimes(Protocol):
    """The subset of the phase recorder that is used here."""

    def seconds(self) -> Sequence[float]: ...
    def at_commit(self) -> tuple[float, Sequence[float]]: ...


class StepAccount(Hook):
    """The time account. One per process, used by the main thread; inactive outside of a world.

    It need not be called after each step: the recorder has the time of the last one.
    """

    SEES_EACH_STEP = False

    def __init__(
        self, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK, times: PhaseTimes = phases
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._times = times
        self._generation: int | None = None
        self._is_first = False
        self._step = self._began_step = 0
        self._began_s = 0.0
        self._began: Sequence[float] = ()

    def enter_world(self, world: World, step: int) -> None:
        """See :class:`Hook`."""
        phases.account()
        self._generation, self._step, self._is_first = world.generation, step, True
        self._begin_window(self._clock.monotonic(), self._times.seconds())

    def commit(self, step: int) -> None:
        """See :class:`Hook`."""
        if self._generation is None:
            return
        self._step = step
        if self._is_first or self._clock.monotonic() - self._began_s >= STEP_TIMES_S:
            self._report("first-step" if self._is_first else "due", *self._times.at_commit())
            self._is_first = False

    def leave_world(self, reason: Left) -> None:
        """See :class:`Hook`. The time in a paused world counts as waiting for the next one."""
        if self._generation is not None and reason != "pause":
            self._report(reason, self._clock.monotonic(), self._times.seconds())
        self._generation = None

    def _begin_window(self, now_s: float, seconds: Sequence[float]) -> None:
        self._began_step = self._step
        self._began_s, self._began = now_s, seconds

    def _report(self, ended: str, now_s: float, seconds: Sequence[float]) -> None:
        assert self._generation is not None
        steps = self._step - self._began_step
        committed_s, committed = self._times.at_commit() if steps else (self._began_s, self._began)
        window = [b - a for a, b in zip(self._began, seconds, strict=True)]
        open_ = [b - a for a, b in zip(committed, seconds, strict=True)]
        duration_s = now_s - self._began_s
        open_s = (now_s - committed_s) - sum(open_[phase] for phase in _OUTSIDE_STEPS)
        outside_s = sum(window[phase] for phase in _OUTSIDE_STEPS)
        event = RankTimes(
            generation=self._generation,
            step=self._step,
            steps=steps,
            duration_s=round(duration_s, 6),
            productive_s=round(max(0.0, duration_s - outside_s - open_s), 6),
            data_s=round(window[Phase.DATA], 6),
            checkpoint_s=round(window[Phase.CHECKPOINT], 6),
            evaluation_s=round(window[Phase.EVALUATION], 6),
            open_s=round(max(0.0, open_s), 6),
            collective_s=round(window[Phase.COLLECTIVE] - open_[Phase.COLLECTIVE], 6),
            ended=ended,
        )
        self._journal.emit(event, level=logging.DEBUG)
        self._begin_window(now_s, seconds)
