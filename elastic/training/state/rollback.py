"""Rolls back an interrupted step: to the exact state of the last commit, or not at all.

Non-parameter state is copied at every commit (:mod:`elastic.training.state.snapshot`). Weights and
large tracked objects are not copied while the script changes them only in ways that are detected
and need not be undone: weights by ``optimizer.step()`` (a repeated step masks it, see
:class:`elastic.training.step.Step`), and large objects in ``run.after_step``. They are watched, and
a step that is interrupted after any other change leaves this rank's state torn: it is restored from
a peer or a checkpoint. Scripts that make other changes (hand-written SGD, SAM, weight clipping, an
EMA updated in the loop) do so in every step. So after the first such change copies are kept, at the
cost of one copy of the affected state per step, and interrupted steps are repeated exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic.telemetry.log import get_logger
from elastic.training.state.change_watch import ChangeWatch, compares_content
from elastic.training.state.copies import WeightCopies, tensors_in
from elastic.training.state.job_state import JobState, Stateful
from elastic.training.state.snapshot import NonParameterState, Snapshot, WholeObject

OUTSIDE = "weights change outside of optimizer.step()"
NESTED = "an optimizer steps inside another optimizer's step()"
UNWRAPPED = "an optimizer updates parameters that are in no wrapped module"
SEVERAL = "a step makes several updates"
PARTIAL = "an optimizer steps while another one accumulates gradients"


@dataclass(frozen=True)
class RolledBack:
    """The result of a rollback of this rank's state."""

    is_torn: bool  # the state belongs to no step
    has_updates: bool  # the weights still contain the step's optimizer updates


class Rollback:
    """Takes snapshots, and rolls back. One per process, created once all objects are registered."""

    def __init__(self, job: JobState, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._job = job
        self._optimizers = optimizers
        self._non_parameters = NonParameterState(job)
        self._large = {name: _Large(name, t) for name, t in self._non_parameters.large.items()}
        self._watch = ChangeWatch(self._weights, self._counted)
        self._copies: WeightCopies | None = None
        self._has_logged = False  # whether copies were logged
        self._why_copies = ""  # empty: weights are watched
        self._copies_between_loops = False
        self._has_copies = False  # copies of the last commit, or of the end of the last loop, exist
        self._has_changed = False  # weights changed outside of optimizers since the last commit
        self._steps = 0  # committed in this process
        self._has_adopted = False  # facts learned by other ranks were adopted
        # Set if a step is repeated while its updates stay in the weights: the repeated forward
        # passes see updated weights, so their batch statistics are discarded at the commit.
        self.final_buffers: dict[str, Any] | None = None
        self._own: tuple[torch.Tensor, ...] = ()
        self.snapshot: Snapshot = {}

    def _weights(self) -> Sequence[torch.Tensor]:
        modules = list(self._job.modules.values())
        if len(modules) == 1 and not self._own:
            return modules[0].local_parameters
        return [*(p for module in modules for p in module.local_parameters), *self._own]

    def _counted(self) -> Sequence[torch.Tensor]:
        modules = list(self._job.modules.values())
        if len(modules) == 1 and not self._own:
            return modules[0].counted_parameters
        return [*(p for module in modules for p in module.counted_parameters), *self._own]

    # -- while training -----------------------------------------------------------------------

    def take(self) -> None:
        """Take a snapshot of the current state, which is a commit's or a step's initial state."""
        self.snapshot = self._non_parameters.take()
        self._has_changed = False
        by_content = compares_content(self._steps)
        self._has_copies = self._is_copying and self._copy_weights()
        if not self._has_copies or not self._why_copies:
            self._watch.expect(by_content=by_content)
        for large in self._large.values():
            large.take(by_content=by_content, is_first=self._is_learning)

    @property
    def _is_learning(self) -> bool:
        """Whether the first step follows, so that it is unknown which state the script changes."""
        return self._steps == 0 and not self._has_adopted

    @property
    def _is_copying(self) -> bool:
        return bool(self._why_copies) or self._is_learning

    def committed(self) -> None:
        """Commit a step and record its changes. :meth:`take` must follow."""
        self._steps += 1
        if self.final_buffers is not None:
            self._non_parameters.restore_buffers(self.final_buffers)
            self.final_buffers = None
        if not self._is_copying:
            self._copies = None  # they were needed for the first step only
        if not self._why_copies and (self._has_changed or self._watch.has_changed):
            self.copy_weights(OUTSIDE)
        for large in self._large.values():
            large.learn()

    def leave_step(self) -> None:
        """Called at the end of a loop: later changes by the script belong to no step."""
        if self._copies_between_loops and not self._why_copies:
            self._has_copies = self._copy_weights()

    def script_has_run(self) -> None:
        """Called at the beginning of a loop; :meth:`take` must follow."""
        if not self._copies_between_loops and self._watch.has_changed:
            self._copies_between_loops = True  # for example, weights swapped for evaluation

    def before_update(self) -> None:
        """Called before an optimizer changes weights."""
        if not self._why_copies and not self._has_changed:
            self._has_changed = self._watch.has_changed

    def after_update(self) -> None:
        """Called after an optimizer has changed weights."""
        if not self._why_copies:
            self._watch.expect(by_content=compares_content(self._steps))

    def watch_also(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch weights of the job that are in no wrapped module, too."""
        self._own = tuple(parameters)
        self._watch.forget()
        self.copy_weights(UNWRAPPED)

    @property
    def script_changes_weights(self) -> bool:
        """Whether weights change outside of optimizers, in this step or in earlier ones."""
        return self._why_copies == OUTSIDE or self._has_changed or self._watch.has_changed

    def copy_weights(self, why: str) -> None:
        """Keep a copy of the weights and of the optimizers' states from the next commit on."""
        if not self._why_copies:
            self._why_copies = why

    # -- other ranks --------------------------------------------------------------------------

    @property
    def habits(self) -> dict[str, Any]:
        """Facts learned about the script, as JSON values, for joining ranks."""
        return {
            "weights": self._why_copies,
            "between_loops": self._copies_between_loops,
            "large": sorted(name for name, large in self._large.items() if large.is_copied),
        }

    def adopt(self, habits: Mapping[str, Any], snapshot: Snapshot) -> None:
        """Load the non-parameter state and the habits of the rank with whose state the job
        continues."""
        self.copy_weights(str(habits["weights"]))
        self._copies_between_loops |= bool(habits["between_loops"])
        self._has_adopted = True
        for name in habits["large"]:
            if name in self._large:
                self._large[name].is_copied = True
        self._non_parameters.restore(snapshot)
        self.snapshot = snapshot
        self.forget()

    def forget(self) -> None:
        """Forget the expected state, which was replaced; :meth:`take` sets it again."""
        self._watch.forget()
        self._has_copies = self._has_changed = False
        for large in self._large.values():
            large.forget()

    def expect_weights(self) -> None:
        """Begin a world with the current weights, which only training may change."""
        self._watch.expect(by_content=False)

    @property
    def weights_have_changed(self) -> bool:
        """Whether weights have changed, by any means, since they were expected."""
        return self._watch.has_changed

    # -- after a fault ------------------------------------------------------------------------

    def restore_non_parameters(self) -> None:
        """Undo a step's changes of the non-parameter state."""
        if self.snapshot:
            self._non_parameters.restore(self.snapshot)

    def restore(self, *, is_torn: bool, is_updated: bool = False) -> RolledBack:
        """Undo the changes of the current step.

        Args:
            is_torn: whether an update has begun but not ended.
            is_updated: whether an optimizer has stepped for the first time in this step.
        """
        buffers = self._non_parameters.buffers() if is_updated else None
        self.restore_non_parameters()
        if self._has_copies and self._copies is not None:
            self._copies.restore(self._weights(), list(self._optimizers.values()))
            is_torn = has_updates = False
        else:
            has_updates = True
            is_torn = is_torn or self._has_changed or self._watch.has_changed
        for large in self._large.values():
            is_torn = not large.restore() or is_torn
        if buffers is not None and has_updates and self.final_buffers is None:
            self.final_buffers = buffers
        return RolledBack(is_torn=is_torn, has_updates=has_updates and not is_torn)

    def _copy_weights(self) -> bool:
        """Copy weights and optimizer state. Returns whether there was enough memory."""
        if self._why_copies and not self._has_logged:
            self._has_logged = True
            get_logger().info(
                "%s: from now on the weights are copied in each step, so that an interrupted step "
                "can be repeated exactly",
                self._why_copies,
            )
        if self._copies is None:
            self._copies = WeightCopies()
        try:
            self._copies.take(self._weights(), list(self._optimizers.values()))
        except torch.OutOfMemoryError:
            self._copies = None
            if not self._is_learning:
                get_logger().warning(
                    "not enough memory for a copy of the weights: after an interrupted step, the "
                    "state is restored from a peer or a checkpoint"
                )
            return False
        return True


class _Large:
    """A tracked object that is too large to copy at every commit without need."""

    def __init__(self, name: str, tracked: Stateful) -> None:
        self.is_copied = False
        self._name = name
        self._tracked = tracked
        self._object = WholeObject(tracked)
        self._taken: Any = None
        self._tensors = _finder(tracked)
        self._watch = ChangeWatch(self._tensors)

    def take(self, *, by_content: bool, is_first: bool) -> None:
        self._taken = self._object.take() if self.is_copied or is_first else None
        if not self.is_copied:
            self._watch.expect(by_content=by_content)

    def learn(self) -> None:
        if not self.is_copied and self._watch.has_changed:
            self.is_copied = True
            get_logger().info(
                "%s changes within steps: from now on it is copied in each step, so that an "
                "interrupted step can be repeated exactly; run.after_step(update) needs no copies",
                self._name,
            )

    def restore(self) -> bool:
        """Restore the object. Returns whether its state is the commit's."""
        if self._taken is not None:
            self._object.restore(self._taken)
            return True
        return not self._watch.has_changed

    def forget(self) -> None:
        self._taken = None
        self._watch.forget()


def _finder(tracked: Stateful) -> Callable[[], Sequence[torch.Tensor]]:
    if isinstance(tracked, nn.Module):
        module = tracked  # without its state_dict, which takes a third of a millisecond
        return lambda: [*module.parameters(), *module.buffers()]
    return lambda: tensors_in(tracked.state_dict())
