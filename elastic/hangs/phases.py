"""The contents of a worker's page, and the hooks that determine them.

``phases`` is the recorder of this process. Every method may be called before
:meth:`PhaseRecorder.start`, in processes without an agent, in forked children and on other threads
than the one that called it: there it has no effect.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any

from elastic.hangs.budgets import FIRST_STEPS
from elastic.hangs.facts import COLLECTIVE, DATA, SCRIPT, Flag, Phase
from elastic.hangs.page import Page
from elastic.hangs.phase_sums import COMMITTED, OWN_LOADER, SAMPLES, PhaseSums
from elastic.stragglers.windows import StepWindows, step_windows
from elastic.tuning.worker_intervals import STEP_SUMS_S

_SMOOTHING = 10  # of collectives' durations: the newest counts a tenth
_OLDEST_GENERATION = 2  # a full garbage collection: younger ones take microseconds
_MAX_NOTED = 1024  # numbers

# By number, so that the page holds no text. c10d's OpType (torch/csrc/distributed/c10d/Work.hpp).
OPERATIONS = (
    "broadcast",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "all_gather",
    "_all_gather_base",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all_base",
    "all_to_all",
    "send",
    "recv",
    "recv_any_source",
    "barrier",
    "_reduce_scatter_base",
    "coalesced",
    "all_reduce_sparse",
    "reduce_scatter_tensor_coalesced",
)


# On the page, an operation of the host is this and its number, so that a wait takes one write.
_HOST = 1 << 8


def on_host(operation: int) -> int:
    """The number on the page of an operation that the host waits for, and no device runs."""
    return _HOST | operation & (_HOST - 1)


def is_on_host(number: int) -> bool:
    """Whether a number on the page is that of an operation of the host."""
    return number >= _HOST


def operation_name(number: int) -> str:
    """The name of an operation, for sentences."""
    number = number & (_HOST - 1) if is_on_host(number) else number
    return OPERATIONS[number] if 0 <= number < len(OPERATIONS) else "a collective"


class PhaseRecorder:
    """Records the activity of this process's main thread. One per process: :data:`phases`."""

    def __init__(self, windows: StepWindows = step_windows) -> None:
        self._windows = windows
        self._noted: list[int] = []  # since the last sum; see elastic/hangs/phase_sums.py
        self._sum_at_ns = 0  # when to sum it up
        self._page: Page | None = None
        self._thread = 0  # the training thread
        self._generation = 0
        self._step = 0
        self._samples = 0  # of this rank in the step
        self._phase = Phase.STARTING
        self._outer = Phase.STARTING
        self._rank = -1
        self._operation = -1
        self._collective = 0
        self._steps_in_world = 0
        self._checkpoint_step = -1
        self.planned_steps = 0  # of the whole job; 0: unknown
        self._collective_ns = 0
        self._is_moved = True  # the page's contents other than the phase have changed
        self._since_ns = monotonic_ns()
        self._flags = 0
        self._sums = PhaseSums()
        self._sees_compilation = False

    # -- the beginning ------------------------------------------------------------------------

    def start(self) -> int:
        """Create the page and install the hooks; returns the page's descriptor, for the agent.

        Raises OSError where the kernel gives no memory.
        """
        if self._page is None:
            self._page = Page()
            self._watch_thread()
            gc.callbacks.append(self._on_garbage)
            _watch_debugger(self.set_flag)
            self._move(self._page, self._phase, self._since_ns)
            self._page.write_planned_steps(self.planned_steps)
        return self._page.fd

    def account(self) -> None:
        """Start summing this thread's time in each phase, with or without a page."""
        if self._page is None:
            self._watch_thread()

    def _watch_thread(self) -> None:
        if not self._thread:
            os.register_at_fork(after_in_child=self._stop)
        self._thread = get_ident()

    def _stop(self) -> None:
        """In a forked child: the page is its parent's."""
        self._page, self._thread = None, 0

    def seconds(self) -> list[float]:
        """The time in each phase until now. Call it on the thread of :meth:`account`."""
        self._sum_up()
        total_s = self._sums.total_s
        total_s[self._phase] += (monotonic_ns() - self._since_ns) * 1e-9
        return total_s

    def at_commit(self) -> tuple[float, list[float]]:
        """When the last step was committed, on the monotonic clock, and :meth:`seconds` then."""
        self._sum_up()
        return self._sums.committed_ns * 1e-9, self._sums.committed_s

    @property
    def is_on(self) -> bool:
        """Whether an agent reads the page."""
        return self._page is not None

    # -- phases of the main thread ------------------------------------------------------------

    def enter(self, phase: Phase) -> Phase:
        """The main thread is in ``phase`` from now on; returns the previous one.

        It always runs with cold caches, so it only records: sums are computed periodically.
        """
        before = self._phase
        if get_ident() != self._thread:
            return before
        now_ns = monotonic_ns()
        noted = self._noted
        noted += (before, now_ns - self._since_ns)
        self._phase, self._since_ns = phase, now_ns
        if self._page is not None:
            if self._is_moved:
                self._move(self._page, phase, now_ns)
            else:
                self._page.write(phase, now_ns)
        if len(noted) > _MAX_NOTED:
            self._sum_up()
        return before

    def enter_batch(self) -> Phase:
        """A batch is requested from a ``DataLoader`` of the process; returns the previous phase.

        If this library distributes the training data, a loader that is read elsewhere belongs to
        the script, for example to an evaluation. It does not make a rank a straggler.
        """
        before = self.enter(DATA)
        is_of_training = before is DATA or not self._samples
        if not is_of_training and get_ident() == self._thread:
            self._noted += (OWN_LOADER, 0)
        return before

    def begin_step(self, number: int, samples: int = 0) -> None:
        """The script receives a step. Its work before the forward pass is its own code: an
        evaluation on rank 0 or a plot may take any time.

        ``samples``: of this rank; 0: the script distributes the data itself.
        """
        if number != self._step:
            self._step, self._is_moved = number, True
        if samples != self._samples:
            self._samples = samples
            self._noted += (SAMPLES, samples)
        self.enter(SCRIPT)
        if self._steps_in_world <= FIRST_STEPS:
            self._watch_compilation()

    def committed(self, step: int) -> None:
        """A step was committed; ``step`` is their number."""
        self._step = step
        self._steps_in_world = steps = self._steps_in_world + 1
        self._is_moved = True
        self.enter(SCRIPT)
        if get_ident() != self._thread:
            return
        now_ns, noted = self._since_ns, self._noted
        noted += (COMMITTED, now_ns)
        if steps <= FIRST_STEPS:
            self._commit_early()
        elif now_ns >= self._sum_at_ns:
            self._sum_up()
            self._watch_compilation()

    def _commit_early(self) -> None:
        """One of the first steps in a world, which take longer than later ones."""
        self._sum_up()
        self._windows.restart(self._generation, self._since_ns)
        if self._steps_in_world == FIRST_STEPS:
            self._sums.forget_durations()
            self._write_durations()

    def _sum_up(self) -> None:
        noted, self._noted = self._noted, []
        self._sum_at_ns = self._since_ns + int(STEP_SUMS_S * 1e9)
        is_measured = self._page is not None and self._steps_in_world > FIRST_STEPS
        if self._sums.add(noted, self._windows if is_measured else None):
            self._write_durations()

    def _write_durations(self) -> None:
        if self._page is not None:
            self._page.write_durations(self._sums.longest_s, self._sums.typical_s)

    def enter_generation(self, generation: int) -> None:
        """Another world was entered: its group is built next."""
        self._sum_up()
        self._sums.forget_durations()
        self._generation = generation
        self._steps_in_world = 0
        self._collective_ns = 0
        self._is_moved = True
        self.enter(Phase.FORMING)

    def progressed(self) -> None:
        """A sign of life, from another thread while the main thread changes no phase
        (:mod:`elastic.hangs.busy`). For the agent, the phase begins again; the sums are as before.
        """
        if self._page is not None:
            self._page.write(self._phase, monotonic_ns())

    def begin_world(self, rank: int) -> None:
        """The state is agreed: training continues."""
        self._rank, self._is_moved = rank, True
        self.enter(Phase.SCRIPT)

    def saved(self, step: int) -> None:
        """A checkpoint of that step is complete, as reported to this rank."""
        self._checkpoint_step, self._is_moved = step, True

    def plan_steps(self, steps: int) -> None:
        """Set the planned number of steps of the entire job; 0: unknown."""
        if steps == self.planned_steps:
            return
        self.planned_steps = steps
        if self._page is not None:
            self._page.write_planned_steps(steps)

    # -- collectives --------------------------------------------------------------------------

    def queued(self, collective: int) -> None:
        """The number of collectives begun; if they are queued on a device, the host does not
        wait."""
        self._collective, self._is_moved = collective, True

    def begun(self, collective: int) -> None:
        """The same from any thread, on behalf of the main thread, which may be blocked: it does not
        count as progress."""
        self._collective = collective
        if self._page is not None:
            self._page.write_collective(collective)

    def begin_wait(self, collective: int, operation: int) -> Phase:
        """The main thread waits for other ranks; returns the argument of :meth:`end_wait`."""
        before = self._phase
        page = self._page
        if page is None or get_ident() != self._thread:
            return before
        now_ns = monotonic_ns()
        self._noted += (before, now_ns - self._since_ns)
        self._phase, self._since_ns = COLLECTIVE, now_ns
        self._collective, self._operation = collective, operation
        if before is not COLLECTIVE:
            self._outer = before
        if self._is_moved:
            self._move(page, COLLECTIVE, now_ns)
        else:
            page.write_wait(COLLECTIVE, now_ns, self._outer, operation, collective)
        return before

    def end_wait(self, before: Phase) -> None:
        """The wait has ended, successfully or not."""
        page = self._page
        if page is None or get_ident() != self._thread:
            return
        now_ns, noted = monotonic_ns(), self._noted
        took_ns = now_ns - self._since_ns
        noted += (self._phase, took_ns)
        self._phase, self._since_ns = before, now_ns
        self._collective_ns += (took_ns - self._collective_ns) // _SMOOTHING
        if self._is_moved:
            self._move(page, before, now_ns)
        else:
            page.write_end_of_wait(before, now_ns, self._collective_ns)
        if len(noted) > _MAX_NOTED:
            self._sum_up()

    # -- flags --------------------------------------------------------------------------------

    def set_flag(self, flag: int, is_set: bool) -> None:
        """Set or clear a flag, from any thread. ``flag``: a :class:`Flag`, or its number."""
        flags = self._flags | flag if is_set else self._flags & ~flag
        if flags == self._flags:
            return
        self._flags = flags
        if self._page is not None:
            self._page.write_flags(self._flags)

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == _OLDEST_GENERATION:
            self.set_flag(Flag.GARBAGE, phase == "start")

    def _watch_compilation(self) -> None:
        """Register with torch.compile once it is imported: importing it here takes a second."""
        if self._sees_compilation or self._page is None:
            return
        module = sys.modules.get("torch._dynamo.callback")
        if module is None:
            return
        self._sees_compilation = True
        handler = getattr(module, "callback_handler", None)
        for name, is_begin in (("register_start_callback", True), ("register_end_callback", False)):
            register = getattr(handler, name, None)
            if register is not None:
                register(self._on_compilation(is_begin))

    def _on_compilation(self, is_begin: bool) -> Callable[..., None]:
        def compiles(*args: Any) -> None:
            self.set_flag(Flag.COMPILING, is_begin)

        return compiles

    def _move(self, page: Page, phase: Phase, since_ns: int) -> None:
        self._is_moved = False
        page.write_place(
            phase,
            since_ns,
            self._generation,
            self._step,
            self._outer,
            self._rank,
            self._operation,
            self._collective,
            self._steps_in_world,
            self._checkpoint_step,
            self._collective_ns,
        )


phases = PhaseRecorder()
"""The recorder of this process."""


def _watch_debugger(set_flag: Callable[[int, bool], None]) -> None:
    """Detect open prompts: ``breakpoint()``, ``pdb.set_trace()``, IPython's ipdb and
    ``torch.distributed.breakpoint()`` all call ``Pdb.interaction``."""
    import pdb

    at_prompt = pdb.Pdb.interaction

    def interaction(self: pdb.Pdb, *args: Any, **kwargs: Any) -> Any:
        set_flag(Flag.DEBUGGER, True)
        try:
            return at_prompt(self, *args, **kwargs)
        finally:
            set_flag(Flag.DEBUGGER, False)

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
    if "pydevd" in sys.modules:  # an editor's debugger pauses threads without this call
        set_flag(Flag.DEBUGGER, True)
