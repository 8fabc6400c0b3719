"""What the worker says on its page, and the hooks by which it knows.

``phases`` is the one of this process. Every method may be called before
:meth:`PhaseRecorder.start`, in processes without an agent, in forked children and in other threads
than the one that has started it: it does nothing there.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic.hangs.budgets import FIRST_STEPS
from elastic.hangs.facts import Flag, Phase
from elastic.hangs.page import Page
from elastic.stragglers.facts import StepPart
from elastic.stragglers.windows import StepWindows, step_windows

# Of the longest that a phase took, the fraction kept after each step: half after 35.
_KEPT_PER_STEP = 0.98
_SMOOTHING = 0.1
_OLDEST_GENERATION = 2  # a full collection: the younger ones take microseconds
# What a phase counts as in the times of steps. By number: this is looked up in every phase.
_PARTS = tuple(
    {
        Phase.DATA: StepPart.DATA,
        Phase.COMPUTE: StepPart.COMPUTE,
        Phase.OPTIMIZER: StepPart.COMPUTE,
        Phase.COLLECTIVE: StepPart.COLLECTIVE,
        Phase.CHECKPOINT: StepPart.CHECKPOINT,
    }.get(phase, StepPart.SCRIPT)
    for phase in Phase
)

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


def operation_name(number: int) -> str:
    """For sentences."""
    return OPERATIONS[number] if 0 <= number < len(OPERATIONS) else "a collective"


class PhaseRecorder:
    """Where the main thread of this process is. One per process: :data:`phases`."""

    def __init__(self, windows: StepWindows = step_windows) -> None:
        self._windows = windows
        self._parts_s = [0.0] * len(StepPart)  # of the present step
        self._samples = 0  # of this rank in it
        self._is_own_loader = False  # in DATA: the script reads a data set beside the training one
        self._page: Page | None = None
        self._thread = 0  # the one that trains
        self._generation = 0
        self._step = 0
        self._phase = Phase.STARTING
        self._outer = Phase.STARTING
        self._rank = -1
        self._operation = -1
        self._collective = 0
        self._steps_in_world = 0
        self._checkpoint_step = -1
        self._collective_s = 0.0
        self._since_ns = time.monotonic_ns()
        self._flags = Flag.NONE
        self._longest_s = [0.0] * len(Phase)
        self._typical_s = [0.0] * len(Phase)
        self._total_s = [0.0] * len(Phase)
        self._sees_compilation = False

    # -- the beginning ------------------------------------------------------------------------

    def start(self) -> int:
        """Make the page and install the hooks; the descriptor of the page, for the agent.

        Raises OSError where the kernel gives no memory.
        """
        if self._page is None:
            self._page = Page()
            self._watch_thread()
            gc.callbacks.append(self._on_garbage)
            _watch_debugger(self.set_flag)
            self._write()
        return self._page.fd

    def account(self) -> None:
        """Add up the time of this thread in each phase, with or without a page."""
        if self._page is None:
            self._watch_thread()

    def _watch_thread(self) -> None:
        if not self._thread:
            os.register_at_fork(after_in_child=self._stop)
        self._thread = threading.get_ident()

    def _stop(self) -> None:
        """In a forked child: the page is its parent's."""
        self._page, self._thread = None, 0

    def seconds(self) -> list[float]:
        """By phase, what :meth:`account` has added up until now. For its thread."""
        total_s = self._total_s.copy()
        total_s[self._phase] += (time.monotonic_ns() - self._since_ns) * 1e-9
        return total_s

    @property
    def is_on(self) -> bool:
        """Whether anybody reads it."""
        return self._page is not None

    # -- where the main thread is -------------------------------------------------------------

    def enter(self, phase: Phase) -> Phase:
        """The main thread is in ``phase`` from now on; returns the one that it was in."""
        before = self._phase
        if threading.get_ident() != self._thread:
            return before
        now_ns = time.monotonic_ns()
        took_s = (now_ns - self._since_ns) * 1e-9
        self._total_s[before] += took_s
        if took_s > self._longest_s[before]:
            self._longest_s[before] = took_s
        self._typical_s[before] += _SMOOTHING * (took_s - self._typical_s[before])
        part = _PARTS[before]
        if self._is_own_loader and before is Phase.DATA:
            part, self._is_own_loader = StepPart.SCRIPT, False
        self._parts_s[part] += took_s
        self._phase, self._since_ns = phase, now_ns
        if self._page is not None:
            self._write()
        return before

    def enter_batch(self) -> Phase:
        """A ``DataLoader`` of the process is asked for a batch; returns the phase before.

        Where this library hands out the training data, a loader that is read at another place is
        the script's own: an evaluation's. Nobody is slow because of it.
        """
        before = self.enter(Phase.DATA)
        is_of_training = before is Phase.DATA or not self._samples
        if not is_of_training and threading.get_ident() == self._thread:
            self._is_own_loader = True
        return before

    def begin_step(self, number: int, samples: int = 0) -> None:
        """The script is handed a step. What it does before the forward pass is its own code: an
        evaluation on rank 0, a picture that is written, may take as long as they need.

        ``samples``: of this rank; 0: the script distributes the data itself.
        """
        self._step, self._samples = number, samples
        self.enter(Phase.SCRIPT)
        if self._page is not None and not self._sees_compilation:
            self._watch_compilation()

    def committed(self, step: int) -> None:
        """A step has taken effect; ``step`` of them have."""
        self._step = step
        self._steps_in_world += 1
        self.enter(Phase.SCRIPT)
        if self._page is not None:
            if self._steps_in_world > FIRST_STEPS:
                self._windows.add(self._parts_s, self._samples, self._since_ns)
            else:
                self._windows.restart(self._generation, self._since_ns)
            for part in StepPart:
                self._parts_s[part] = 0.0
            if self._steps_in_world == FIRST_STEPS:  # they say nothing of later ones
                self._forget_durations()
            self._page.write_durations(self._longest_s, self._typical_s)
            self._longest_s = [_KEPT_PER_STEP * took_s for took_s in self._longest_s]

    def enter_generation(self, generation: int) -> None:
        """Another world is entered: its group is built next."""
        self._generation = generation
        self._steps_in_world = 0
        self._collective_s = 0.0
        self._forget_durations()
        self.enter(Phase.FORMING)

    def _forget_durations(self) -> None:
        self._longest_s = [0.0] * len(Phase)
        self._typical_s = [0.0] * len(Phase)

    def begin_world(self, rank: int) -> None:
        """The state is agreed: training goes on."""
        self._rank = rank
        self.enter(Phase.SCRIPT)

    def saved(self, step: int) -> None:
        """This rank knows that a checkpoint of that step is complete."""
        self._checkpoint_step = step

    # -- collectives --------------------------------------------------------------------------

    def queued(self, collective: int) -> None:
        """This many collectives are begun; where they are queued on a device, nobody waits."""
        self._collective = collective

    def begin_wait(self, collective: int, operation: int) -> Phase:
        """The main thread waits for other ranks; returns what to give to :meth:`end_wait`."""
        before = self._phase
        if self._page is None or threading.get_ident() != self._thread:
            return before
        self._collective, self._operation = collective, operation
        if before is not Phase.COLLECTIVE:
            self._outer = before
        return self.enter(Phase.COLLECTIVE)

    def end_wait(self, before: Phase) -> None:
        """The wait is over, well or not."""
        if self._page is None or threading.get_ident() != self._thread:
            return
        took_s = (time.monotonic_ns() - self._since_ns) * 1e-9
        self._collective_s += _SMOOTHING * (took_s - self._collective_s)
        self.enter(before)

    # -- flags --------------------------------------------------------------------------------

    def set_flag(self, flag: Flag, is_set: bool) -> None:
        """From any thread. No sign of life."""
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
        """Once torch.compile is there: it is imported late, and importing it takes a second."""
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

    def _write(self) -> None:
        assert self._page is not None
        self._page.write(
            self._generation,
            self._step,
            self._phase,
            self._outer,
            self._rank,
            self._operation,
            self._collective,
            self._steps_in_world,
            self._checkpoint_step,
            self._collective_s,
            self._since_ns,
        )


phases = PhaseRecorder()
"""Of this process."""


def _watch_debugger(set_flag: Callable[[Flag, bool], None]) -> None:
    """Know when a person is at a prompt: ``breakpoint()``, ``pdb.set_trace()``, IPython's ipdb and
    ``torch.distributed.breakpoint()`` all come to ``Pdb.interaction``."""
    import pdb

    at_prompt = pdb.Pdb.interaction

    def interaction(self: pdb.Pdb, *args: Any, **kwargs: Any) -> Any:
        set_flag(Flag.DEBUGGER, True)
        try:
            return at_prompt(self, *args, **kwargs)
        finally:
            set_flag(Flag.DEBUGGER, False)

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
    if "pydevd" in sys.modules:  # an editor's debugger pauses threads where nobody sees it
        set_flag(Flag.DEBUGGER, True)
