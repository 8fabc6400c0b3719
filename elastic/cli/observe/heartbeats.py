"""The age of the nodes' heartbeats, as recorded by the leader.

Lateness is judged by the leader's clock alone: this machine's may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.cli.observe.printable import duration, printable
from elastic.leadership.job_progress import JobProgress
from elastic.membership.records import Node
from elastic.tuning.agent_intervals import HEARTBEAT_LATE_S


@dataclass(frozen=True, kw_only=True)
class HeartbeatView:
    """The last heartbeat of a node and its age."""

    age_s: float | None = None  # None: the leader has recorded none
    step: int | None = None  # last step reported by its workers
    is_late: bool = False
    generation: int = 0  # the newest in which its workers have begun a step; 0: none or unknown
    has_joined: bool | None = False  # a worker has called elastic.join(); None: agents cannot know

    def __str__(self) -> str:
        if self.age_s is None:
            return "-"
        return f"{duration(self.age_s)} ago{' (late)' if self.is_late else ''}"


def heartbeats_by_node(progress: JobProgress | None, now_s: float) -> dict[str, HeartbeatView]:
    """Heartbeats by node id, for the nodes in the leader's record."""
    if progress is None:
        return {}
    is_old = _is_old(progress, now_s)
    return {
        heard.node_id: HeartbeatView(
            age_s=max(0.0, max(now_s, progress.time_s) - heard.heard_at_s),
            step=heard.step,
            generation=heard.generation,
            has_joined=heard.has_joined,
            is_late=is_old or progress.time_s - heard.heard_at_s > HEARTBEAT_LATE_S,
        )
        for heard in progress.heartbeats
    }


def late_heartbeats(
    progress: JobProgress | None,
    nodes: Iterable[Node],
    heartbeats: Mapping[str, HeartbeatView],
    now_s: float,
) -> list[str]:
    """Warnings about late heartbeats."""
    if progress is None or not progress.heartbeats:
        return []
    if _is_old(progress, now_s):
        ago = duration(now_s - progress.time_s)
        return [f"the leader has recorded no heartbeats for {ago}, or clocks differ"]
    found = ((node, heartbeats.get(node.node_id, HeartbeatView())) for node in nodes)
    return [
        f"no heartbeat of {printable(node.name, 60)} for {duration(heartbeat.age_s)}"
        for node, heartbeat in found
        if heartbeat.is_late and heartbeat.age_s is not None
    ]


def _is_old(progress: JobProgress, now_s: float) -> bool:
    return bool(progress.heartbeats) and now_s - progress.time_s > HEARTBEAT_LATE_S
