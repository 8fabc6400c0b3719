"""Saves into several tiers, each with its own policies: memory every 10 steps, disk every 1,000.

Each tier has its own engine, so a slow, full or unavailable tier affects its own saves only. To
resume, read all tiers as one storage (:class:`~checkpoints.TieredStorage`)::

    engine = TieredEngine([
        Tier(own_memory(folder), when=EverySteps(10)),
        Tier("s3://bucket/job", when=EverySteps(1000) | OnPreemption(), keep=LatestN(5)),
    ])
    …
    engine.save_async(state, step=step, world=world, tiers=engine.due(step))
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from checkpoints.errors import ArgumentError
from checkpoints.intervals import SAVE_DEADLINE_S
from checkpoints.policies.retention import LatestN, RetentionFunction
from checkpoints.policies.save import SaveContext, SavePolicy
from checkpoints.saving.engine import Engine
from checkpoints.saving.outcome import SaveHandle, SaveOutcome, SaveStatus, WriterGroup
from checkpoints.storage.roots import Root, storage_for

_SMOOTHING = 0.3  # weight of a new save in the exponential average of their cost


@dataclass(frozen=True)
class Tier:
    """A checkpoint root with its own save and retention policy."""

    root: Root
    when: SavePolicy
    keep: RetentionFunction | None = LatestN(3)  # noqa: RUF009  frozen


@dataclass(frozen=True)
class TierOutcome:
    """The outcome of a save into one tier."""

    tier: int
    place: str
    outcome: SaveOutcome


@dataclass
class _Running:
    """A tier with its engine and the inputs of its save policy."""

    tier: Tier
    place: str
    engine: Engine
    saved_step: int
    saved_s: float
    cost_s: float = 0.0

    def update_cost(self, outcome: SaveOutcome) -> None:
        if outcome.status is SaveStatus.COMMITTED:
            before_s = self.cost_s or outcome.stall_s
            self.cost_s = before_s + _SMOOTHING * (outcome.stall_s - before_s)


class TieredEngine:
    """One engine per tier. Its one owner closes it.

    ``began_at_step``: the step of the state that training resumes from. Other arguments as for
    :class:`~checkpoints.Engine`. Raises :class:`ArgumentError` if there are no tiers.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        began_at_step: int = 0,
        deadline_s: float = SAVE_DEADLINE_S,
        busy: Literal["skip", "wait"] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not tiers:
            raise ArgumentError("no tiers: at least one is required")
        self._monotonic = monotonic
        self._began_s = monotonic()
        self._tiers: list[_Running] = []
        for tier in tiers:
            storage = storage_for(tier.root)
            engine = Engine(
                storage,
                keep=tier.keep,
                deadline_s=deadline_s,
                busy=busy,
                clock=clock,
                monotonic=monotonic,
            )
            self._tiers.append(_Running(tier, storage.place, engine, began_at_step, self._began_s))

    @property
    def needs_agreement(self) -> bool:
        """Whether one rank must call :meth:`due` and share the result with all."""
        return any(running.tier.when.needs_agreement for running in self._tiers)

    def due(self, step: int, *, preempted: bool = False, failures: int = 0) -> tuple[int, ...]:
        """The indices of the tiers whose policies request a save after ``step`` steps."""
        now_s = self._monotonic()
        return tuple(
            index
            for index, running in enumerate(self._tiers)
            if running.tier.when(
                SaveContext(
                    step=step,
                    now_s=now_s,
                    began_s=self._began_s,
                    saved_step=running.saved_step,
                    saved_s=running.saved_s,
                    in_flight=running.engine.in_flight,
                    preempted=preempted,
                    save_cost_s=running.cost_s,
                    failures=failures,
                )
            )
        )

    def save_async(
        self,
        state: object,
        *,
        step: int,
        world: WriterGroup,
        tiers: Collection[int],
        data_position: Any = None,
    ) -> tuple[SaveHandle, ...]:
        """Copy this rank's share once for each of ``tiers``, and return.

        Every rank of ``world`` calls it for the same steps and tiers. Raises as
        :meth:`Engine.save_async <checkpoints.Engine.save_async>` does.
        """
        handles = []
        for index in sorted(tiers):
            running = self._tiers[index]
            handles.append(
                running.engine.save_async(
                    state, step=step, world=world, data_position=data_position
                )
            )
            running.saved_step, running.saved_s = step, self._monotonic()
        return tuple(handles)

    def outcomes(self) -> tuple[TierOutcome, ...]:
        """The saves that ended since the last call. Call it every step: it detects hung saves."""
        ended = []
        for index, running in enumerate(self._tiers):
            for outcome in running.engine.outcomes():
                running.update_cost(outcome)
                ended.append(TierOutcome(index, running.place, outcome))
        return tuple(ended)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no tier has a save in flight; False after ``timeout_s``."""
        until_s = None if timeout_s is None else self._monotonic() + timeout_s
        done = [running.engine.wait(self._left_s(until_s)) for running in self._tiers]
        return all(done)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the saves in flight and join the threads; False if one did not end in time."""
        until_s = None if timeout_s is None else self._monotonic() + timeout_s
        ended = [running.engine.close(self._left_s(until_s)) for running in self._tiers]
        return all(ended)

    def __enter__(self) -> TieredEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:  # close all, even if one raises
            for running in self._tiers:
                stack.callback(running.engine.__exit__, kind, error, trace)

    def _left_s(self, until_s: float | None) -> float | None:
        return None if until_s is None else max(until_s - self._monotonic(), 0.0)
