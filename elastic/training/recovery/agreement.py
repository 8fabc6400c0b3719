"""Selects the rank with whose state a new world continues.

docs/explanation/protocol.md, section 6, "Agreement".

Every rank reports its position; the lowest of the most advanced ranks is the source. The generation
of the last agreement is compared first: if a rank completed a step alone in an old generation, and
the others repeated that step before it returns, it has the same step count but different weights.
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
    passes: int = 0  # over loaders, begun since the job began
    callbacks: int = 0  # outstanding run.after_step callbacks of the last committed step


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


def _order(state: RankState) -> tuple[int, int, int, int, bool]:
    assert state.tag is not None
    tag = state.tag
    return tag.generation, tag.step, tag.passes, -tag.callbacks, state.begun


def _to_json(state: RankState) -> dict[str, Any]:
    tag = state.tag
    encoded = None
    if tag is not None:
        encoded = [tag.generation, tag.step, tag.passes, tag.callbacks]
    return {**vars(state), "tag": encoded}


def _parse(data: dict[str, Any]) -> RankState:
    tag = data["tag"]
    parsed = None
    if tag is not None:
        generation, step, passes, callbacks = tag
        parsed = Tag(int(generation), int(step), int(passes), int(callbacks))
    return RankState(
        str(data["nonce"]),
        parsed,
        bool(data["begun"]),
        bool(data["is_torn"]),
        int(data["retries"]),
        int(data["returned"]),
    )
