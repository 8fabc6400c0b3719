"""Selects the rank whose state a new world continues with.

docs/explanation/protocol.md, section 6, "Agreement".

Every rank reports its position; the lowest of the most advanced ranks is the source. The generation
of the last agreement is compared first: a rank that completed a step alone in an old generation and
returns after the others repeated that step has the same step count but different weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from elastic.errors import TrainingError
from elastic.process_group import all_gather_json


@dataclass(frozen=True)
class Tag:
    """The position of a rank's weights. Equal tags mean equal weights."""

    generation: int  # in which all ranks last agreed
    step: int  # steps committed since the job began
    stepped: tuple[str, ...] = ()  # optimizers that have stepped since, in order
    iteration: int = 0  # of the accumulation in which they did, from 0
    callbacks: int = 0  # outstanding run.after_step callbacks of the last committed step


@dataclass(frozen=True)
class RankState:
    """One rank's contribution to an agreement."""

    nonce: str  # of the world that the rank is in
    tag: Tag | None  # None: a joining node, or weights that belong to no step
    begun: bool = False  # whether it is inside a step
    is_torn: bool = False  # it has trained, and its weights no longer belong to a step
    retries: int = 0  # calls of run.retry that it has completed


@dataclass(frozen=True)
class Agreement:
    """The state that all ranks of the world continue with."""

    source: int | None  # the rank that has the state, or the first of a replica; None: no rank
    tag: Tag | None
    receivers: tuple[int, ...]  # ranks that need the source's weights
    is_torn: bool = False  # some rank's weights are neither the initial ones nor of a step
    retries: int = 0  # calls of run.retry that some rank has completed
    # Replicas with that state, the source's first: it follows from the rest.
    holders: tuple[int, ...] = field(default=(), compare=False)

    @property
    def is_fresh(self) -> bool:
        """No rank has a state: a checkpoint or the initial state is used."""
        return self.source is None


def agree(mine: RankState, replica_size: int = 1) -> Agreement:
    """Compare all ranks' states; the result is the same on every rank.

    Raises TrainingError if the group joins ranks of different worlds.
    """
    return choose([_parse(told) for told in all_gather_json(_tell(mine))], replica_size)


def choose(states: list[RankState], replica_size: int = 1) -> Agreement:
    """The lowest rank with the greatest tag, and the ranks with another one.

    With replicas of several ranks: the first of the lowest replica whose ranks all have that tag.
    A replica whose ranks differ has no state, because a part of it is useless.
    """
    if len({s.nonce for s in states}) > 1:
        raise TrainingError(
            f"ranks of different worlds are in one group: {[s.nonce for s in states]}",
            hint="this is a bug: report it with the journals of all nodes",
        )
    whole = [
        states[first]
        if len({s.tag for s in states[first : first + replica_size]}) == 1
        else replace(states[first], tag=None)
        for first in range(0, len(states), replica_size)
    ]
    known = [(replica, s) for replica, s in enumerate(whole) if s.tag is not None]
    is_torn = any(s.is_torn for s in states)
    retries = max(s.retries for s in states)
    if not known:
        return Agreement(None, None, (), is_torn, retries)
    source, best = max(known, key=lambda item: (*_order(item[1]), -item[0]))
    others = tuple(
        rank for rank in range(len(states)) if whole[rank // replica_size].tag != best.tag
    )
    holders = tuple(replica for replica, s in known if _order(s) == _order(best))
    return Agreement(source * replica_size, best.tag, others, is_torn, retries, holders)


def _order(state: RankState) -> tuple[int, int, int, int, int, bool]:
    assert state.tag is not None
    tag = state.tag
    done = (len(tag.stepped), tag.iteration, -tag.callbacks)
    return tag.generation, tag.step, *done, state.begun


def _tell(state: RankState) -> dict[str, Any]:
    tag = state.tag
    told = None
    if tag is not None:
        told = [tag.generation, tag.step, list(tag.stepped), tag.iteration, tag.callbacks]
    return {**vars(state), "tag": told}


def _parse(told: dict[str, Any]) -> RankState:
    tag = told["tag"]
    parsed = None
    if tag is not None:
        generation, step, stepped, iteration, callbacks = tag
        parsed = Tag(
            int(generation), int(step), tuple(map(str, stepped)), int(iteration), int(callbacks)
        )
    return RankState(
        str(told["nonce"]), parsed, bool(told["begun"]), bool(told["is_torn"]), int(told["retries"])
    )
