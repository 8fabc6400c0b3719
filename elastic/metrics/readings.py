"""Gauges of a node at the time of a scrape, read from its state without a lock."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from elastic.membership.records import NodeState, Outcome, WorldState
from elastic.metrics import table
from elastic.metrics.counting import NodeMetrics
from elastic.metrics.table import Metric
from elastic.metrics.tally import Labels
from elastic.node.status import NodeStatus

Reading = tuple[Metric, Labels, float]


@dataclass(frozen=True, kw_only=True)
class NodeReadings:
    """The sources of gauges. The functions must neither block nor take a lock."""

    status: NodeStatus
    metrics: NodeMetrics
    node_states: Callable[[], Mapping[NodeState, int] | None]  # of all nodes; None: not the leader
    etcd_contact_age_s: Callable[[], float | None]

    def gauges(self) -> Iterator[Reading]:
        """One reading per series. Unknown values are omitted."""
        yield from self._world()
        yield from self._states()
        yield from self._progress()
        yield from self._ages()

    def _world(self) -> Iterator[Reading]:
        node, world = self.status.node, self.status.world.world
        yield table.BUILD_INFO, (node.library, node.torch, platform.python_version()), 1.0
        yield table.MIN_NODES, (), node.min_nodes
        yield table.MAX_NODES, (), node.max_nodes
        if world is not None:
            yield table.GENERATION, (), world.generation
            yield table.WORLD_NODES, (), len(world.members)
            yield table.WORLD_SIZE, (), world.size
            yield table.WORLD_PAUSED, (), world.state is WorldState.PAUSED

    def _states(self) -> Iterator[Reading]:
        node, done = self.status.node, self.status.done
        yield table.IN_WORLD, (), self.status.has_workers_in_a_world and done is None
        for state in NodeState:
            yield table.NODE_STATE, (state.value,), node.state is state
        for outcome in Outcome:
            yield table.JOB_ENDED, (outcome.value,), done is not None and done.outcome is outcome
        nodes = self.node_states()
        yield table.IS_LEADER, (), nodes is not None
        for state in NodeState if nodes is not None else ():
            yield table.NODES, (state.value,), nodes.get(state, 0) if nodes is not None else 0

    def _progress(self) -> Iterator[Reading]:
        step_rate, checkpoint = self.status.step_rate, self.metrics.last_checkpoint
        if step_rate is not None:
            yield table.STEP, (), step_rate.step
        if checkpoint is not None:
            yield table.CHECKPOINT_STEP, (), checkpoint[0]
            yield table.CHECKPOINT_TIME, (), checkpoint[1]

    def _ages(self) -> Iterator[Reading]:
        ages = (
            (table.HEARTBEAT_AGE, self.metrics.heartbeat_age_s),
            (table.AGENT_SILENCE, max(self.status.watchdog.silences_s().values(), default=None)),
            (table.ETCD_CONTACT_AGE, self.etcd_contact_age_s()),
        )
        for metric, age_s in ages:
            if age_s is not None:
                yield metric, (), max(0.0, age_s)
        yield table.ETCD_UP, (), not self.status.store_problem
