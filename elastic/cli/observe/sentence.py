"""A job's status in one sentence: ``training in generation 7 with 3 of 4 nodes; …``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.cli.observe.heartbeats import late_heartbeats
from elastic.cli.observe.job_view import JobCondition, JobView
from elastic.cli.observe.printable import duration, printable
from elastic.membership.records import BreakageRecord, Node, NodeState, Outcome, WorldRecord
from elastic.tuning.agent_intervals import RECENT_LOSS_S

Ago = Callable[[float], str]
_MAX_NAMES = 3


def sentence(view: JobView, ago: Ago | None = None) -> str:
    """The job's status: ``training in generation 7 with 3 of 4 nodes; …``.

    ``ago`` formats a wall-clock time; the default is ``12.0 s ago``.
    """
    ago = ago or (lambda time_s: f"{duration(max(0.0, view.at_s - time_s))} ago")
    parts = [_state(view, ago), *_losses(view, ago), *_late(view), *_joining(view)]
    return "; ".join(parts)


def _state(view: JobView, ago: Ago) -> str:
    world, done = view.world, view.done
    if done is not None:
        how = "succeeded" if done.outcome is Outcome.SUCCESS else "failed"
        step = f" at step {done.final_step}" if done.final_step is not None else ""
        return (
            f"{how}{step} in generation {done.generation}, {ago(done.time_s)}: "
            f"{printable(done.reason)}"
        )
    if world is None:
        if not view.nodes:
            return f"no such job: there is nothing under {printable(view.root)}"
        least = max(node.min_nodes for node in view.nodes)
        if len(view.nodes) < least:
            return f"waiting for nodes: {len(view.nodes)} of at least {least} have arrived"
        arrived = "1 node has" if len(view.nodes) == 1 else f"{len(view.nodes)} nodes have"
        return f"waiting for the first generation: {arrived} arrived, at least {least} needed"
    generation, members = world.generation, len(world.members)
    if view.state is JobCondition.DOWN and not members:
        return f"down: all nodes left gracefully {ago(world.time_s)}; a restart resumes the job"
    if view.state is JobCondition.DOWN:
        return (
            f"down: no node is alive; generation {generation} was formed with "
            f"{_count(members, 'node')}, {ago(world.time_s)}"
        )
    if view.state is JobCondition.PAUSED:
        return (
            f"paused in generation {generation}: {len(view.members)} of at least "
            f"{world.min_nodes} nodes, not training"
        )
    if view.state is JobCondition.STARTING:
        return _starting(view, world)
    if view.is_switching:
        former = max(node.running.generation for node in view.training if node.running)
        return (
            f"training in generation {former} with {_count(len(view.training), 'node')}; "
            f"generation {generation} begins with step {world.switch_at_step} "
            f"({printable(world.reason)})"
        )
    return f"training in generation {generation} with {members} of {world.max_nodes} nodes"


def _starting(view: JobView, world: WorldRecord) -> str:
    members = len(world.members)
    if len(view.inside) < members:
        return (
            f"starting generation {world.generation}: {len(view.inside)} of its "
            f"{_count(members, 'node')} have entered it ({printable(world.reason)})"
        )
    steps = [node for node in view.inside if node not in view.training]
    importing = [n for n in steps if view.heartbeat_of(n).has_joined is False]
    what = "have not called elastic.join() yet" if importing else "have not begun a step yet"
    return (
        f"starting generation {world.generation} with {members} of {world.max_nodes} nodes: "
        f"workers of {_names(importing or steps, members)} {what}"
    )


def _names(nodes: Sequence[Node], all_nodes: int) -> str:
    """``n1 and n2``, ``all nodes``, or how many."""
    if len(nodes) == all_nodes:
        return "all nodes" if all_nodes > 1 else "its node"
    if len(nodes) > _MAX_NAMES:
        return _count(len(nodes), "node")
    return " and ".join(printable(node.name, 60) for node in nodes)


def _losses(view: JobView, ago: Ago) -> list[str]:
    """Nodes that left recently and have not returned, and nodes whose workers failed last."""
    breakages = view.world.breakages if view.world is not None else ()
    recent = [b for b in reversed(breakages) if view.at_s - b.time_s <= RECENT_LOSS_S]
    if view.done is not None or not recent or not (view.world and view.world.members):
        return []
    texts = {node.name: "" for node in view.training}
    for breakage in recent:
        for names, what in ((breakage.lost, "was lost"), (breakage.left, "left")):
            for name in names:
                texts.setdefault(name, f"{printable(name, 60)} {what} {ago(breakage.time_s)}")
    gone = [text for text in texts.values() if text]
    if len(gone) > _MAX_NAMES:
        gone[_MAX_NAMES:] = [f"and {len(gone) - _MAX_NAMES} more"]
    newest = recent[0]
    failed = dict.fromkeys(f.node for f in newest.failures if f.node not in newest.lost)
    workers = [f"a worker of {printable(n, 60)} failed {ago(newest.time_s)}" for n in failed]
    return [*gone, *workers]


def _late(view: JobView) -> list[str]:
    if view.done is not None:
        return []
    return late_heartbeats(view.progress, view.nodes, view.heartbeats, view.at_s)


def _joining(view: JobView) -> list[str]:
    if view.done is not None:
        return []
    if view.world is None:
        return _incomplete_replicas(view)
    waits = {NodeState.ARRIVED: "is waiting", NodeState.STARTING: "is warming up"}
    return [
        f"{printable(node.name, 60)} waits: {why}"
        if (why := view.why_waiting(node))
        else f"{printable(node.name, 60)} {waits.get(node.state, 'is about to join')}"
        for node in view.joining
        if node.state not in (NodeState.LEAVING, NodeState.FINISHED) and not view.is_lost(node)
    ]


def _incomplete_replicas(view: JobView) -> list[str]:
    few = [n for n in view.nodes if n.nodes_per_replica > 1 and view.why_waiting(n)]
    if not few:
        return []
    from elastic.membership.replicas import waiting_for_others  # not cheap to import

    names = [printable(node.name, 60) for node in few]
    return [waiting_for_others(names, few[0].nodes_per_replica)]


def incident(breakage: BreakageRecord) -> str:
    """A short description of the incident that ended a world."""
    parts = [f"{printable(name, 60)} was lost" for name in breakage.lost]
    parts += [f"{printable(name, 60)} left" for name in breakage.left]
    failed = dict.fromkeys(f.node for f in breakage.failures if f.node not in breakage.lost)
    parts += [f"a worker of {printable(name, 60)} failed" for name in failed]
    return ", ".join(parts) or "cause unknown"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
