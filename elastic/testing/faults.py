"""Faults as values: a kill matrix is a product of these.

A fault defines *what* happens to which target; a trigger defines *when*. Both are frozen and print
as a sentence, so that a failing run names itself and can be run again::

    Injection(Kill(RankZero()), AfterStep(20)).run(cluster)
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol

from elastic.testing.cluster import LocalCluster
from elastic.testing.node import LocalNode
from elastic.testing.processes import send


class Target(Protocol):
    """The target of a fault."""

    def find(self, cluster: LocalCluster) -> list[LocalNode]:
        """The current target nodes. Raises LookupError if there are none."""
        ...


@dataclass(frozen=True)
class Named:
    """The nodes with these names."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return " and ".join(self.names)

    def find(self, cluster: LocalCluster) -> list[LocalNode]:
        return [cluster.node(name) for name in self.names]


@dataclass(frozen=True)
class TheLeader:
    """The node of the leader."""

    def __str__(self) -> str:
        return "the leader's node"

    def find(self, cluster: LocalCluster) -> list[LocalNode]:
        """The leader's node. Raises ClusterTimeout if none leads."""
        return [cluster.leader()]


@dataclass(frozen=True)
class OfRank:
    """The node that runs this rank."""

    rank: int = 0

    def __str__(self) -> str:
        return f"the node of rank {self.rank}"

    def find(self, cluster: LocalCluster) -> list[LocalNode]:
        """The node of the rank. Raises LookupError if no world has this rank."""
        return [cluster.node_of_rank(self.rank)]


@dataclass(frozen=True)
class Bystanders:
    """``count`` running nodes that neither lead nor run rank 0, newest first."""

    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} other node(s)"

    def find(self, cluster: LocalCluster) -> list[LocalNode]:
        """These nodes. Raises LookupError if there are fewer, ClusterTimeout if none leads."""
        special = {cluster.leader().name, cluster.node_of_rank(0).name}
        others = [node for node in reversed(cluster.running) if node.name not in special]
        if len(others) < self.count:
            raise LookupError(f"only {len(others)} nodes neither lead nor run rank 0")
        return others[: self.count]


@dataclass(frozen=True)
class Everyone:
    """All running nodes."""

    def __str__(self) -> str:
        return "every node"

    def find(self, cluster: LocalCluster) -> list[LocalNode]:
        """These nodes. Raises LookupError if there is none."""
        if not cluster.running:
            raise LookupError("no node is running")
        return cluster.running


class Fault(Protocol):
    """A fault."""

    def inject(self, cluster: LocalCluster) -> None:
        """Inject the fault into the cluster. Raises LookupError if there is no such target."""
        ...


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL one worker of the target."""

    target: Target
    local_rank: int = 0

    def __str__(self) -> str:
        return f"kill worker {self.local_rank} of {self.target}"

    def inject(self, cluster: LocalCluster) -> None:
        """Kill them. Raises LookupError if a node of the target has no such worker."""
        # Find all before killing one: other agents may end their workers as soon as one dies.
        workers_by_node = [(node, node.workers()) for node in self.target.find(cluster)]
        for node, workers in workers_by_node:
            if self.local_rank not in workers:
                raise LookupError(f"{node} has no worker {self.local_rank}, only {sorted(workers)}")
        for _, workers in workers_by_node:
            send(workers[self.local_rank].pid, signal.SIGKILL)


@dataclass(frozen=True)
class KillAgent:
    """SIGKILL only the target's agent."""

    target: Target

    def __str__(self) -> str:
        return f"kill the agent of {self.target}"

    def inject(self, cluster: LocalCluster) -> None:
        for node in self.target.find(cluster):
            node.kill_agent()


@dataclass(frozen=True)
class Kill:
    """SIGKILL all processes of the target at once, like a power failure."""

    target: Target

    def __str__(self) -> str:
        return f"kill {self.target}"

    def inject(self, cluster: LocalCluster) -> None:
        for node in self.target.find(cluster):
            node.kill()


@dataclass(frozen=True)
class Stop:
    """SIGSTOP all processes of the target, until something resumes them."""

    target: Target

    def __str__(self) -> str:
        return f"stop {self.target}"

    def inject(self, cluster: LocalCluster) -> None:
        for node in self.target.find(cluster):
            node.pause()


@dataclass(frozen=True)
class Terminate:
    """SIGTERM the target's agent, as a scheduler does to preempt a node."""

    target: Target

    def __str__(self) -> str:
        return f"terminate {self.target}"

    def inject(self, cluster: LocalCluster) -> None:
        for node in self.target.find(cluster):
            node.terminate()


@dataclass(frozen=True)
class Join:
    """New nodes arrive."""

    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} node(s) join"

    def inject(self, cluster: LocalCluster) -> None:
        """Start them. Raises ValueError if one of their names is taken."""
        cluster.start_nodes(self.count)


class Trigger(Protocol):
    """The time of a fault."""

    def wait(self, cluster: LocalCluster) -> None:
        """Block until the time of the fault. Raises ClusterTimeout if it is not reached."""
        ...


@dataclass(frozen=True)
class Now:
    """Immediately."""

    def __str__(self) -> str:
        return "immediately"

    def wait(self, cluster: LocalCluster) -> None:
        del cluster


@dataclass(frozen=True)
class AfterStep:
    """Once this step is completed."""

    step: int

    def __str__(self) -> str:
        return f"after step {self.step}"

    def wait(self, cluster: LocalCluster) -> None:
        cluster.wait_step(self.step)


@dataclass(frozen=True)
class AfterSteps:
    """Once this many more steps are completed."""

    count: int = 5

    def __str__(self) -> str:
        return f"{self.count} steps later"

    def wait(self, cluster: LocalCluster) -> None:
        cluster.wait_progress(self.count)


@dataclass(frozen=True)
class AtGeneration:
    """As soon as this generation is agreed: while its workers start and build the group."""

    generation: int

    def __str__(self) -> str:
        return f"when generation {self.generation} is agreed"

    def wait(self, cluster: LocalCluster) -> None:
        cluster.wait_generation(self.generation)


@dataclass(frozen=True)
class Injection:
    """One fault with its trigger."""

    fault: Fault
    trigger: Trigger = Now()

    def __str__(self) -> str:
        return f"{self.fault} {self.trigger}"

    def run(self, cluster: LocalCluster) -> None:
        """Wait for the trigger, then inject the fault."""
        self.trigger.wait(cluster)
        self.fault.inject(cluster)
