"""Pairs of nodes that cannot connect to each other: who is excluded, and what the others lose.

The model builds group after group from the nodes that are not excluded. A build fails if two of
them cannot connect, and each such pair is reported by one of its ends, or by both.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from elastic.membership.budget import IN_A_ROW, FailedBuilds

Pair = frozenset[str]


@dataclass
class Job:
    """``members`` have trained together, ``joining`` are to be admitted."""

    members: tuple[str, ...]
    joining: frozenset[str]
    broken: frozenset[Pair]
    counter: FailedBuilds = field(default_factory=FailedBuilds)
    excluded: list[str] = field(default_factory=list)
    attempts: int = 0

    def train(self, data: st.DataObject) -> None:
        """Until a group is built."""
        while pairs := self._between(self.world):
            self.attempts += 1
            reports: dict[str, set[str]] = defaultdict(set)
            for pair in sorted(map(sorted, pairs)):
                for reporter in data.draw(st.sets(st.sampled_from(pair), min_size=1)):
                    reports[reporter].update({*pair} - {reporter})
            missed = {node: tuple(sorted(others)) for node, others in reports.items()}
            out = self.counter.failed(
                self.world,
                missed,
                has_run=False,
                joining=self.joining & set(self.world),
            )
            self.excluded += out

    @property
    def world(self) -> tuple[str, ...]:
        return tuple(node for node in self.members if node not in self.excluded)

    def _between(self, world: tuple[str, ...]) -> list[Pair]:
        return [pair for pair in self.broken if pair <= set(world)]

    def lacks(self, node: str) -> int:
        """The number of nodes to which it has no connection."""
        return sum(node in pair for pair in self.broken)


NAMES = tuple(f"n{i}" for i in range(1, 8))


@st.composite
def worlds(draw: st.DrawFn, at_least: int = 2) -> tuple[tuple[str, ...], frozenset[str]]:
    """The nodes of a planned world in rank order, and those of them that join: the last ones."""
    count = draw(st.integers(at_least, len(NAMES)))
    joining = draw(st.integers(0, count - 1))
    return NAMES[:count], frozenset(NAMES[count - joining : count])


@given(world=worlds(at_least=3), data=st.data())
def test_a_node_that_several_others_cannot_reach_is_the_only_one_to_go(
    world: tuple[tuple[str, ...], frozenset[str]], data: st.DataObject
) -> None:
    members, joining = world
    culprit = data.draw(st.sampled_from(members))
    others = [node for node in members if node != culprit]
    missed = data.draw(st.sets(st.sampled_from(others), min_size=2))
    job = Job(members, joining, frozenset(frozenset((culprit, node)) for node in missed))
    job.train(data)
    assert job.excluded == [culprit]
    assert job.attempts == (1 if culprit in joining else IN_A_ROW)


@given(world=worlds(), data=st.data())
def test_one_pair_costs_the_members_of_a_running_world_nothing_but_a_build(
    world: tuple[tuple[str, ...], frozenset[str]], data: st.DataObject
) -> None:
    """Either end may be the cause: a joining one goes, and of two equal ones one only."""
    members, joining = world
    pair = data.draw(st.sampled_from(list(combinations(members, 2))))
    job = Job(members, joining, frozenset({frozenset(pair)}))
    job.train(data)
    (excluded,) = job.excluded
    assert excluded in pair
    if joining.isdisjoint(pair):
        assert job.attempts == IN_A_ROW
    else:
        assert excluded == pair[1], "the joining one, or of two the more junior one"
        assert job.attempts == 1


@given(world=worlds(), data=st.data())
def test_members_that_reach_each_other_lose_none_for_fewer_broken_connections(
    world: tuple[tuple[str, ...], frozenset[str]], data: st.DataObject
) -> None:
    members, joining = world
    pairs = [pair for pair in combinations(members, 2) if not joining.isdisjoint(pair)]
    drawn = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    job = Job(members, joining, frozenset(map(frozenset, drawn)))
    job.train(data)
    for node in job.excluded:
        assert node in joining or job.lacks(node) >= 2, "a tie"
        assert job.lacks(node), "innocent"
    assert job.world, "and somebody trains"
    assert job.attempts <= 1 + IN_A_ROW * len(members)


@given(world=worlds(), data=st.data())
def test_a_group_is_built_whatever_is_broken(
    world: tuple[tuple[str, ...], frozenset[str]], data: st.DataObject
) -> None:
    members, joining = world
    drawn = data.draw(st.sets(st.sampled_from(list(combinations(members, 2)))))
    job = Job(members, joining, frozenset(map(frozenset, drawn)))
    job.train(data)
    assert all(job.lacks(node) for node in job.excluded)
    assert job.attempts <= IN_A_ROW * len(members)
