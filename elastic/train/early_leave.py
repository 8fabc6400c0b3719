"""Detects a rank that leaves the loop while others begin another step.

A time limit is reached on one rank first; a target is met on the samples of one rank. That rank
continues behind its loop, with an evaluation or the end of training, and the others wait for it in
the gradients of a step. Their next collectives would be combined: gloo ends the process, and NCCL
sums the wrong tensors.

So a rank that leaves a loop before its end publishes in the world's store how many steps it has
done, before any collective, and waits until all ranks have left there. A rank that waits long for a
collective reads it. If it is in a later step, no rank can continue: it publishes a verdict, with
which all ranks raise the same error.

A loop that all ranks leave costs two requests to the store. Ranks leave it within the time by which
their steps differ, so nothing waits that would not wait in the next collective.
"""

from __future__ import annotations

import datetime
import json
import threading
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from elastic import torch_private
from elastic.errors import SYSTEM_CLOCK, TrainingError, WorldLost
from elastic.groups.pending import call_in_long_waits, waits_for_ranks
from elastic.groups.world import World
from elastic.train.checks import is_left_on_purpose
from elastic.train.hooks import Hook
from elastic.train.lifecycle import WorldPhase
from elastic.train.session import Session
from elastic.tuning.intervals import (
    LONG_WAIT_S,
)
from elastic.worker.worlds import SingleCall

# A rank that has left a loop waits this long for the others to leave it, before it continues: some
# may still evaluate in the same step.
LEFT_ALONE_S = 30.0
# It checks this often whether the world has ended.
LEFT_SLICE_S = 0.2
# Ranks that end because one has left the loop wait this long for each other: all learn it within
# LONG_WAIT_S, or on a busy machine within seconds. One that learns it too late only reports a lost
# connection.
VERDICT_KNOWN_S = 30.0

_SLICE = datetime.timedelta(seconds=LEFT_SLICE_S)
_TOGETHER, _ANNOUNCED = "together", "announced"
_LOST = (dist.DistError, OSError, WorldLost)  # the store, and with it the world


@dataclass(frozen=True)
class _Note:
    """Where a rank has left a loop."""

    place: str
    done: int  # steps
    collectives: int | None  # that it had begun, if its training function has returned

    @property
    def text(self) -> str:
        return json.dumps([self.place, self.done, self.collectives])

    @classmethod
    def parse(cls, text: str) -> _Note:
        return cls(*json.loads(text))


class EarlyLeave(Hook):
    """Publishes where this rank has left a loop, and checks where others have. One per process."""

    def __init__(self, session: Session) -> None:
        self._job = session.job
        self._current = session.current
        self._lifecycle = session.lifecycle
        self._group = session.group
        self._worlds = session.worlds
        self._progress = session.progress
        self._world: World | None = None
        self._begun = 0  # number of the last step that has begun
        # The world, and the steps done, when a loop was left, until that is published.
        self._left: tuple[World, int] | None = None
        # Where this rank has left loops of this world, and what it knows of the others there.
        self._places: dict[str, str | None] = {}
        self._error: TrainingError | None = None
        self._is_waiting = False
        self._refusing = threading.Lock()
        # The store's host may be frozen, and the link's thread must receive the next world then.
        self._look_aside = SingleCall("elastic-early-leave")
        self._heartbeat_step = 0  # the current step at the last heartbeat
        self._next_look_s = 0.0  # if it lasts
        self._pause_s = LONG_WAIT_S
        call_in_long_waits(self._look)

    def begin(self, number: int) -> None:
        """See :class:`Hook`: step ``number`` is about to begin."""
        self._enter_world()
        self._left = None
        self._begun = number

    def leave_steps(self, *, is_first: bool, is_last: bool) -> None:
        """A loop over steps is left: in its ``is_first`` step, or in its ``is_last`` one.

        In the first step without an update, the script may only have inspected a batch. After an
        update in the last step, the loop has ended.
        """
        if is_last if self._is_trained else is_first:
            return
        self.leave()

    def leave(self) -> None:
        """A loop is left before its end. Never raises: Python only prints exceptions that are
        raised where a generator is closed.

        Returns when it is known where the other ranks have left their loops, or after a while. If
        an exception may be passing through the script, only :meth:`confirm` waits.
        """
        is_main_thread = threading.current_thread() is threading.main_thread()
        if not (is_main_thread and self._is_on):
            return
        self._left = self._lifecycle.world, self._done
        if is_left_on_purpose():
            self._resolve()

    def confirm(self) -> None:
        """The script has continued after its loop. Raises TrainingError if another rank is still in
        it, or has left it earlier."""
        self._resolve()
        self.raise_error()

    def _resolve(self) -> None:
        left, self._left = self._left, None
        if left is not None and left[0] is self._lifecycle.world:
            self._leave(left[1], LEFT_ALONE_S)

    def announce_end(self) -> None:
        """The training function has returned, and does not wait for the others yet."""
        self.confirm()
        self._leave(self._done, 0.0, is_end=True)
        self.raise_error()

    def end(self) -> bool:
        """The training function has returned. Returns whether it has on all ranks; False if the
        world ends before. Raises TrainingError if other ranks are in a loop."""
        self.confirm()
        is_together = self._leave(self._done, float("inf"), is_end=True)
        self.raise_error()
        return is_together

    def raise_error(self) -> None:
        """Raise TrainingError if this rank has left a loop before others, or others before it."""
        if self._error is not None:
            raise self._error from None  # it is the cause of any other error

    # -- the rank that leaves -----------------------------------------------------------------

    @property
    def _is_trained(self) -> bool:
        """Whether the current step has trained: it counts, although it is not committed yet."""
        step, modules = self._current.step, self._job.modules.values()
        if step is None:
            return False
        return step.optimizer_stepped or any(m.reduction.has_new_gradients for m in modules)

    @property
    def _done(self) -> int:
        step = self._current.step
        return self._job.progress.step if step is None else step.number + self._is_trained

    @property
    def _is_on(self) -> bool:
        """Whether this rank trains with others, in a world that has not failed."""
        lifecycle = self._lifecycle
        if lifecycle.phase is not WorldPhase.TRAINING or lifecycle.world.size == 1:
            return False
        if self._worlds is not None and self._worlds.has_newer:
            return False
        is_over = self._group.is_aborted or self._group.may_be_garbage
        return not (is_over or self._progress.is_catching_up)

    def _enter_world(self) -> None:
        if self._world is not self._lifecycle.world:
            self._world, self._places = self._lifecycle.world, {}

    def _key(self, name: str) -> str:
        return f"elastic/left/{self._lifecycle.world.nonce}/{name}"

    def _leave(self, done: int, limit_s: float, *, is_end: bool = False) -> bool:
        """Whether it is known within ``limit_s`` that all ranks have left there."""
        place = f"{done}/end" if is_end else str(done)
        if self._error is not None or not self._is_on:
            return False
        self._enter_world()
        is_new = place not in self._places
        if not is_new and self._places[place] != _ANNOUNCED:
            return self._places[place] == _TOGETHER
        self._places[place] = _ANNOUNCED if limit_s == 0.0 else None
        world = self._lifecycle.world
        self._is_waiting = True
        try:
            with waits_for_ranks():
                store = self._group.store
                if is_new:
                    store.set(self._key(f"{place}/{world.rank}"), "1")
                    note = _Note(place, done, torch_private.collectives_begun() if is_end else None)
                    store.set(self._key("last"), note.text)
                    if store.add(self._key(f"{place}/count"), 1) == world.size:
                        store.compare_set(self._key(f"{place}/verdict"), "", _TOGETHER)
                verdict = self._verdict(store, place, limit_s) if limit_s else _ANNOUNCED
                self._places[place] = verdict
                if verdict not in (None, _TOGETHER, _ANNOUNCED):
                    self._refuse(store, json.loads(verdict))
                return verdict == _TOGETHER
        except _LOST:
            return False  # as the next collective reports
        finally:
            self._is_waiting = False

    def _verdict(self, store: Any, place: str, limit_s: float) -> Any:
        """The verdict on a place, once there is one; None if the world ends, or time runs out."""
        until_s = SYSTEM_CLOCK.monotonic() + limit_s
        key = self._key(f"{place}/verdict")
        while SYSTEM_CLOCK.monotonic() < until_s and self._is_on:
            try:
                store.wait([key], _SLICE)
                return store.get(key).decode()
            except dist.DistStoreError:
                continue
        return None

    # -- the ranks that are still in the loop -------------------------------------------------

    def _look(self) -> None:
        """In a long wait for a collective: raise TrainingError if another rank has left the loop,
        and does not take part."""
        if self._is_waiting or self._error is not None or not self._is_on:
            return
        try:
            self._look_for_others(self._group.store, is_blocked=True)
        except _LOST:
            return
        self.raise_error()

    def on_heartbeat(self) -> None:
        """On the link's thread: check in a step that takes long. The main thread may be blocked in
        a read of a device, behind gradients whose sum waits for the rank that has left."""
        now_s = SYSTEM_CLOCK.monotonic()
        if self._begun != self._heartbeat_step:
            self._heartbeat_step, self._pause_s = self._begun, LONG_WAIT_S
            self._next_look_s = now_s + LONG_WAIT_S
        if now_s < self._next_look_s or self._is_waiting or self._error is not None:
            return
        self._pause_s *= 2
        self._next_look_s = now_s + self._pause_s
        step = self._current.step
        is_reduced = any(m.reduction.is_done for m in list(self._job.modules.values()))
        if step is not None and step.number == self._begun and is_reduced and self._is_on:
            self._look_aside.start(self._look_beside_the_main_thread, self._group.store)

    def _look_beside_the_main_thread(self, store: Any) -> None:
        try:
            self._look_for_others(store, is_blocked=False)
        except _LOST:
            return

    def close(self) -> None:
        """Wait for a pending check."""
        self._look_aside.close()

    def _look_for_others(self, store: Any, *, is_blocked: bool) -> None:
        if not store.check([self._key("last")]):
            return
        note = _Note.parse(store.get(self._key("last")).decode())
        if note.place in self._places or not (
            self._begun >= note.done or (is_blocked and self._is_missed_by(note))
        ):
            return
        key = self._key(f"{note.place}/verdict")
        if not store.check([key]):
            store.compare_set(key, "", json.dumps(self._found(store, note)))
        if (verdict := store.get(key).decode()) != _TOGETHER:
            # (So that the node that has left is excluded, whichever fails first.)
            self._refuse(store, f"this rank ends because {json.loads(verdict)}")

    def _is_missed_by(self, note: _Note) -> bool:
        """Whether a rank whose training function has returned has not begun the collective in which
        this rank waits. It may have ended others already, such as a broadcast."""
        is_counted = self._lifecycle.world.mesh.size == 1 and not torch_private.has_subgroups()
        begun = note.collectives
        return begun is not None and is_counted and torch_private.collectives_begun() > begun

    def _found(self, store: Any, note: _Note) -> str:
        ranks = range(self._lifecycle.world.size)
        left = [r for r in ranks if store.check([self._key(f"{note.place}/{r}")])]
        return _describe(left, note.done, self._lifecycle.world.rank, self._begun)

    def _refuse(self, store: Any, why: str) -> None:
        """Set the error, once all ranks know of it: the first one to end would interrupt the
        others."""
        with self._refusing:
            if self._error is None:
                self._set_error(store, why)

    def _set_error(self, store: Any, why: str) -> None:
        error = TrainingError(
            why,
            hint="let all ranks decide together, after each step or after every few:\n"
            "    is_late = float(time.monotonic() > end)\n"
            '    if run.mean(1.0, late=is_late)["late"] > 0:\n'
            "        return\n"
            "  If no rank decides alone, the script, its arguments or data differ between nodes",
        )
        if store.add(self._key("known"), 1) == self._lifecycle.world.size:
            store.set(self._key("known/all"), "1")
        try:
            store.wait([self._key("known/all")], datetime.timedelta(seconds=VERDICT_KNOWN_S))
        except dist.DistStoreError:
            pass  # a rank does not wait for any collective
        self._error = error
        self._group.abort()


def _describe(left: list[int], done: int, rank: int, begun: int) -> str:
    """
    >>> _describe([0], 8, 2, 8)
    'rank 0 left the loop after step 7, while rank 2 began step 8'
    >>> _describe([0, 1], 8, 2, 7).partition(", ")[2]
    'while rank 2 waits for them in a collective of step 7'
    """
    *others, last = map(str, left)
    names = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
    them = "them" if others else "it"
    after = f"after step {done - 1}" if done else "before step 0"
    what = f"began step {begun}"
    if begun < done:
        what = f"waits for {them} in a collective of step {begun}"
    return f"{names} left the loop {after}, while rank {rank} {what}"
