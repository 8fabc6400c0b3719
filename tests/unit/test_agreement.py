"""The state that a new world continues with (docs/explanation/protocol.md, section 6)."""

from __future__ import annotations

import pytest

from elastic.errors import TrainingError
from elastic.training.recovery.agreement import Agreement, RankState, Tag, choose


def state(tag: Tag | None, *, begun: bool = False, nonce: str = "aa") -> RankState:
    return RankState(nonce, tag, begun)


def test_equal_ranks_need_nothing() -> None:
    tag = Tag(3, 10)
    assert choose([state(tag)] * 3) == Agreement(0, tag, ())


def test_the_furthest_is_the_source_and_the_others_receive() -> None:
    behind, ahead = Tag(3, 10), Tag(3, 11)
    found = choose([state(behind), state(ahead), state(None)])
    assert found == Agreement(1, ahead, (0, 2))


def test_a_rank_whose_optimizer_has_stepped_is_further() -> None:
    before, after = Tag(3, 10), Tag(3, 10, ("optimizer",))
    assert choose([state(before, begun=True), state(after, begun=True)]) == Agreement(
        1, after, (0,)
    )


def test_one_who_came_back_from_an_older_generation_is_not_followed() -> None:
    """History 6: it has committed more steps alone, with other bits."""
    alone, together = Tag(7, 12), Tag(8, 11)
    assert choose([state(alone), state(together), state(together)]) == Agreement(1, together, (0,))


def test_among_equal_weights_a_begun_step_is_further() -> None:
    """What the script does between two steps is behind it: nothing of that is done again."""
    tag = Tag(3, 10)
    found = choose([state(tag), state(tag, begun=True), state(tag, begun=True)])
    assert (found.source, found.receivers) == (1, ())


def test_joining_nodes_alone_have_nothing_to_go_on_with() -> None:
    found = choose([state(None)] * 2)
    assert found.is_fresh
    assert found.receivers == ()


def test_ranks_of_different_worlds_do_not_mix() -> None:
    with pytest.raises(TrainingError, match=r"\['aa', 'bb'\]"):
        choose([state(None, nonce="aa"), state(None, nonce="bb")])
