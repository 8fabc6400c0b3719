"""The state that a new world continues with (docs/explanation/protocol.md, section 6)."""

from __future__ import annotations

import pytest

from elastic.errors import TrainingError
from elastic.train.progress import Agreement, RankState, Tag, choose


def state(tag: Tag | None, *, begun: bool = False, nonce: str = "aa") -> RankState:
    return RankState(nonce, tag, begun)


def test_ranks_with_equal_state_exchange_nothing() -> None:
    tag = Tag(3, 10)
    assert choose([state(tag)] * 3) == Agreement(0, tag, ())


def test_the_most_advanced_rank_sends_its_state_to_the_others() -> None:
    behind, ahead = Tag(3, 10), Tag(3, 11)
    found = choose([state(behind), state(ahead), state(None)])
    assert found == Agreement(1, ahead, (0, 2))


def test_a_rank_that_has_begun_the_next_pass_is_more_advanced() -> None:
    """The script has run since the last commit: a scheduler may have stepped."""
    before, after = Tag(3, 10, passes=1), Tag(3, 10, passes=2)
    assert choose([state(before), state(after, begun=True)]) == Agreement(
        1, after, (0,), begun=True
    )


def test_a_rank_that_has_completed_the_call_is_more_advanced() -> None:
    """The code after the loop has run there, and its changes are in the boundary."""
    within, after = Tag(3, 10, passes=1), Tag(3, 10, passes=1, calls=1)
    assert choose([state(within), state(after)]) == Agreement(1, after, (0,))


def test_ranks_of_a_replica_may_be_in_different_passes() -> None:
    first, second = Tag(3, 10, passes=1), Tag(3, 10, passes=2)
    assert choose([state(second), state(first)], 2) == Agreement(0, first, ())


def test_a_rank_of_an_older_generation_is_not_the_source() -> None:
    """History 6: it committed more steps alone, and its weights diverged."""
    alone, together = Tag(7, 12), Tag(8, 11)
    assert choose([state(alone), state(together), state(together)]) == Agreement(1, together, (0,))


def test_with_equal_weights_a_rank_that_began_its_step_is_more_advanced() -> None:
    """Code between two steps has already run and is not repeated."""
    tag = Tag(3, 10)
    found = choose([state(tag), state(tag, begun=True), state(tag, begun=True)])
    assert (found.source, found.receivers) == (1, ())


def test_a_world_of_joining_nodes_starts_fresh() -> None:
    found = choose([state(None)] * 2)
    assert found.is_fresh
    assert found.receivers == ()


def test_ranks_of_different_worlds_are_rejected() -> None:
    with pytest.raises(TrainingError, match=r"\['aa', 'bb'\]"):
        choose([state(None, nonce="aa"), state(None, nonce="bb")])
