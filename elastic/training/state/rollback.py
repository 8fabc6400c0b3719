"""Returns a rank to the last boundary between two steps, bit for bit, or reports that it cannot.

The small state of a boundary is copied at each boundary (:mod:`elastic.training.state.snapshot`).
Its large tensors are weights, optimizer state, and averages. A copy of them makes every interrupted
step undoable, whatever the script does in it. It is taken at each boundary where it costs little,
or where the script needs it: where a step changes weights before its last collective, so that a
fault can interrupt the step after the change. Otherwise a rank that has begun to change weights
completes the step, because nothing can interrupt it, and the boundary at its end is the one to
which all ranks go (docs/decisions/0032).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal

import torch

from elastic import torch_private
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ConfigError
from elastic.telemetry.log import get_logger
from elastic.training.state.change_watch import ChangeWatch, compares_content
from elastic.training.state.copies import WeightCopies
from elastic.training.state.job_state import JobState
from elastic.training.state.snapshot import BoundaryState, Path, Snapshot, size_bytes
from elastic.tuning.worker_intervals import COPY_IS_CHEAP_S

# Copies are affordable if they cost this fraction of a step, or less than COPY_IS_CHEAP_S.
AFFORDABLE_FRACTION = 0.01
AFFORDABLE_MEMORY = 0.1  # of the memory that is free, on the host or on the device
# At which a device copies: less than those in use reach, so that a copy is not underestimated.
DEVICE_BYTES_PER_S = 1e12
FIRST_STEPS = 3  # of a process: always copied, while the cost and the script are not known yet
# Of gradients that may belong to the state, until a step has added to them: they are sent at once.
UNKNOWN_GRADIENTS_BYTES = 64 << 20


StepCopiesName = Literal["auto", "always", "never"]


class StepCopies(Enum):
    """Whether the large state is copied at each boundary: ``elastic.join(step_copies=…)``."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"  # unless the script changes weights before the last collective of a step


def step_copies_from(name: str) -> StepCopies:
    """Parse the argument of ``elastic.join``. Raises ConfigError for another value."""
    values = [mode.value for mode in StepCopies]
    if name not in values:
        raise ConfigError(
            f"elastic.join: step_copies={name!r} is not one of {', '.join(map(repr, values))}"
        )
    return StepCopies(name)


class Rollback:
    """Takes the state of boundaries, and returns to the last one. One per process, created once all
    objects are registered."""

    def __init__(
        self,
        job: JobState,
        optimizers: Mapping[str, torch.optim.Optimizer],
        mode: StepCopies = StepCopies.AUTO,
    ) -> None:
        self._job = job
        self._optimizers = optimizers
        self._mode = mode
        self._state = BoundaryState(job)
        self._watch = ChangeWatch(self._tensors, self._counted)
        self._copies = WeightCopies()
        self._costs = CopyCosts()
        self._digests = CopyCosts()  # of the large state, where it is not copied
        self._has_copies = False  # of the last boundary
        self._changes_between_loops = False
        self._needs_copies = ""  # why the script needs them; empty: it does not, as far as known
        self._has_changed = False  # weights changed before an optimizer's update in this step
        self._has_updates = False  # an optimizer has begun an update in this step
        self._updated_at: int | None = None  # collectives begun before it; None: not counted
        self._own: tuple[torch.Tensor, ...] = ()
        self.snapshot: Snapshot = {}

    def _weights(self) -> Sequence[torch.Tensor]:
        modules = list(self._job.modules.values())
        if len(modules) == 1 and not self._own:
            return modules[0].local_parameters
        return [*(p for module in modules for p in module.local_parameters), *self._own]

    def _tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that only updates may change within a step, for copies that do not exist."""
        large = self._state.large()
        return [*self._weights(), *large.values()] if large else self._weights()

    def _counted(self) -> Sequence[torch.Tensor]:
        modules = list(self._job.modules.values())
        counted = [p for module in modules for p in module.counted_parameters]
        return [*counted, *self._own, *self._state.large().values()]

    # -- while training -----------------------------------------------------------------------

    def take(self, *, with_copies: bool = False) -> None:
        """Make the current state that of the last boundary.

        ``with_copies``: copy it completely, whatever that costs, if there is enough memory.
        """
        self.snapshot = self._state.take(with_gradients=self._includes_gradients)
        self._has_changed = self._has_updates = False
        self._has_copies = (with_copies or self._copies_steps) and self._copy()
        self._expect(by_content=with_copies or compares_content(self._costs.steps))

    @property
    def _includes_gradients(self) -> bool:
        """Whether gradients belong to the state of the boundary, as far as known: a script that
        sets them to None or zero has no use for them."""
        if self._job.keeps_gradients:
            return True
        if self._costs.steps >= FIRST_STEPS or self._job.is_rebuilt:
            return False
        return size_bytes(self._job.gradients()) <= UNKNOWN_GRADIENTS_BYTES

    @property
    def _adds_to_earlier_gradients(self) -> bool:
        return any(m.reduction.adds_to_earlier for m in self._job.modules.values())

    def note_weights(self) -> None:
        """Note the current weights, without a way back to them."""
        self._has_changed = self._has_updates = False
        self._watch.expect(by_content=False)

    def _expect(self, *, by_content: bool) -> None:
        """Note the current tensors, to notice changes: by their contents in some steps, and in each
        one that has no copy where that is affordable."""
        is_measured = not self._has_copies and self._digests.are_affordable
        began_s = SYSTEM_CLOCK.monotonic()
        self._watch.expect(by_content=by_content or is_measured)
        if is_measured:
            took_s = SYSTEM_CLOCK.monotonic() - began_s
            self._digests.copied(took_s=took_s if self._is_on_host else math.inf, fits=True)

    @property
    def _is_on_host(self) -> bool:
        return all(p.device.type == "cpu" for p in self._weights()[:1])

    @property
    def _copies_steps(self) -> bool:
        if self._job.is_rebuilt:  # after a fault, the state comes from the nodes' memory
            return False
        if self._needs_copies or self._mode is StepCopies.ALWAYS:
            return True
        if self._costs.steps < FIRST_STEPS:
            return True
        return self._mode is StepCopies.AUTO and self._costs.are_affordable

    def _copy(self) -> bool:
        """Copy the large state. Returns whether there was enough memory."""
        began_s = SYSTEM_CLOCK.monotonic()
        try:
            self._copies.take(
                self._weights(),
                list(self._optimizers.values()),
                self._state.large(),
                self._job.tensors_of_modules(),
            )
        except (torch.OutOfMemoryError, MemoryError):
            self._copies = WeightCopies()
            if self._needs_copies:
                get_logger().warning(
                    "not enough memory for a copy of the weights: after an interrupted step, the "
                    "state is restored from a peer or a checkpoint"
                )
            return False
        took_s, size_bytes = SYSTEM_CLOCK.monotonic() - began_s, self._copies.size_bytes
        if not self._is_on_host:  # the copy is only queued
            took_s += 2 * size_bytes / DEVICE_BYTES_PER_S
        free_bytes = self._free_bytes() if self._costs.is_first else 0
        self._costs.copied(took_s=took_s, fits=size_bytes <= AFFORDABLE_MEMORY * free_bytes)
        return True

    def _free_bytes(self) -> int:
        device = next(iter(p.device for p in self._weights()), None)
        if device is not None and device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0]
        return available_bytes()

    def committed(self) -> None:
        """End a step; :meth:`take` must follow. Learns what the script does in its steps."""
        for costs in (self._costs, self._digests):
            costs.step_ended(SYSTEM_CLOCK.monotonic())
        if self._adds_to_earlier_gradients:
            self._job.keeps_gradients = True
        if not self._needs_copies:
            if self._job.keeps_gradients:
                self._need_copies("gradients of a step are kept for the next one")
            elif self.changes_by_script:
                self._need_copies("weights change outside of optimizer.step()")
            elif self._is_followed_by_collectives:
                self._need_copies("ranks communicate after an update")
        if not self._copies_steps:
            self._copies = WeightCopies()  # frees the memory

    def leave_step(self) -> None:
        """Called at the end of a loop: later changes by the script belong to no step."""
        if self._has_copies:
            return
        # The step has ended without a change that belongs to none.
        self._has_copies = self._changes_between_loops and self._copy()
        if not self._has_copies and not self._watch.has_changed:
            self._watch.expect(by_content=True)

    def script_has_run(self) -> None:
        """Called at the beginning of a loop; :meth:`take` must follow."""
        # For example, weights that are exchanged for an evaluation.
        self._changes_between_loops |= self._watch.has_changed

    def _need_copies(self, why: str) -> None:
        self._needs_copies = why
        if not (self._costs.are_affordable or self._mode is StepCopies.ALWAYS):
            get_logger().info(
                "%s: from now on the weights are copied at the beginning of each step, so that an "
                "interrupted step is undone exactly. run.commit() directly after the update makes "
                "the copies unnecessary.",
                why,
            )

    @property
    def _is_followed_by_collectives(self) -> bool:
        """Whether this rank has communicated since the step's first update, so that a fault could
        have interrupted the step after it."""
        if not self._has_updates:
            return False
        now = _communications()
        return now is None or now != self._updated_at

    def before_update(self) -> None:
        """Called before an optimizer changes weights."""
        if not self._has_updates:
            self._has_updates = True
            watch, learns = self._watch, compares_content(self._costs.steps)
            changed = watch.has_changed if learns else watch.has_counted_changes
            self._has_changed = self._has_changed or changed
            self._updated_at = _communications()

    def copy_also(self, parameters: Sequence[torch.Tensor]) -> None:
        """Include weights of the job that are in no wrapped module."""
        self._own = tuple(parameters)
        self._has_copies = False
        self._watch.forget()

    @property
    def changes_by_script(self) -> bool:
        """Whether the script changes weights in its steps, other than by an optimizer."""
        if self._has_changed:
            return True
        return not self._has_updates and self._watch.has_changed

    @property
    def weights_have_changed(self) -> bool:
        """Whether weights have changed since the last boundary, by any means that is noticed."""
        return self._watch.has_changed

    # -- other ranks --------------------------------------------------------------------------

    @property
    def needs_copies(self) -> str:
        """Why the script needs copies, for ranks that join."""
        return self._needs_copies

    def adopt(self, needs_copies: str, snapshot: Snapshot) -> None:
        """Load the small state of the rank with whose state the job continues."""
        self._needs_copies = self._needs_copies or needs_copies
        self._state.restore(snapshot)
        self.snapshot = snapshot
        self.forget()

    def forget(self) -> None:
        """Forget the last boundary's tensors, which were replaced; :meth:`take` must follow."""
        self._watch.forget()
        self._has_copies = self._has_changed = self._has_updates = False

    # -- after a fault ------------------------------------------------------------------------

    @property
    def can_restore(self) -> bool:
        """Whether :meth:`restore` will return True."""
        if self._adds_to_earlier_gradients and "gradients" not in self.snapshot:
            return False  # for the first time: they are not copied yet
        if self._has_copies:
            return True
        return not (self._has_updates or self._has_changed or self._watch.has_changed)

    def can_restore_surely(self, *, by_content: bool) -> bool:
        """The same; ``by_content``: only if no change of the tensors can have remained unnoticed,
        for a script that may just have exchanged them."""
        is_sure = self._has_copies or self._watch.knows_content or not by_content
        return is_sure and self.can_restore

    def restore(self) -> bool:
        """Return to the last boundary. Returns False if that is impossible without the state of
        another rank or a checkpoint; then only the small state is that of the boundary."""
        is_exact = self.can_restore
        if self._has_copies:
            self._copies.restore(
                self._weights(), list(self._optimizers.values()), self._state.large()
            )
        if self.snapshot:
            self._state.restore(self.snapshot, self._kept if self._has_copies else None)
        return is_exact

    def _kept(self, path: Path, own: torch.Tensor | None) -> torch.Tensor | None:
        return self._copies.tensor(path, own)


class CopyCosts:
    """What a copy or a digest of the large state costs, in relation to a step."""

    def __init__(self) -> None:
        self.steps = 0  # committed in this process
        self._copy_s: float | None = None  # the shortest of recent copies; None: there was none
        self._step_s = 0.0  # the shortest of recent steps, including the copy
        self._fits = True
        self._last_end_s: float | None = None
        self.are_affordable = True

    @property
    def is_first(self) -> bool:
        """Whether no copy was recorded yet."""
        return self._copy_s is None

    def copied(self, *, took_s: float, fits: bool) -> None:
        """Record a copy; of the first one, whether it fits into the memory."""
        if self._copy_s is None:
            self._fits = fits
        self._copy_s = min(took_s, self._copy_s or took_s)

    def step_ended(self, now_s: float) -> None:
        """Record the end of a step; decides anew whether copies are affordable at the third step,
        and at each power of two."""
        self.steps += 1
        if self._last_end_s is not None:
            took_s = now_s - self._last_end_s
            self._step_s = min(took_s, self._step_s or took_s)
        self._last_end_s = now_s
        is_decided = self.steps == FIRST_STEPS or self.steps & (self.steps - 1) == 0
        if self.are_affordable and self.steps >= FIRST_STEPS and is_decided:
            limit_s = max(COPY_IS_CHEAP_S, AFFORDABLE_FRACTION * self._step_s)
            self.are_affordable = self._fits and (self._copy_s or 0.0) <= limit_s
            if self.steps > FIRST_STEPS:
                self._step_s = 0.0


def available_bytes() -> int:
    """The memory of this machine that no process uses."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _communications() -> int | None:
    """A number that changes with every collective; None if a group does not count them."""
    counts = torch_private.collectives_of_groups()
    return sum(counts.values()) if counts is not None else None
