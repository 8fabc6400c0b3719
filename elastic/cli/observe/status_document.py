"""A job's status as JSON: the documents of ``elastic status -o json``, ``/api/status`` and
``elastic describe -o json``.

docs/reference/status.md lists the fields, and tests compare the two.
"""

from __future__ import annotations

from typing import Any

from elastic.cli.observe.job_view import JobCondition, JobView
from elastic.cli.observe.sentence import incident, sentence
from elastic.membership.records import BreakageRecord, Node
from elastic.telemetry.printable import shorten

_LONGEST_TEXT = 1000  # characters: a reason may be a traceback of a megabyte
_LONGEST_DESCRIBED = 16_384  # in `elastic describe`: a traceback of many ranks
SCHEMA = 1  # incremented when a field changes its meaning or is removed


def document(view: JobView) -> dict[str, Any]:
    """The document. Times are Unix times, durations seconds."""
    world, progress = view.world, view.progress
    goodput = view.goodput
    found = {
        "schema": SCHEMA,
        "run_id": view.run_id,
        "time": round(view.at_s, 3),
        "state": view.state.value,
        "sentence": sentence(view),
        "generation": world.generation if world is not None else None,
        "cause": world.cause.value if world is not None else None,
        "reason": world.reason if world is not None else None,
        "step": view.step,
        "step_is_old": view.is_step_old,
        "steps_per_s": view.steps_per_s,
        "planned_steps": progress.planned_steps if progress is not None else None,
        "eta_s": _rounded(view.eta_s),
        "goodput": round(goodput, 4) if goodput is not None else None,
        "goodput_since": _rounded(progress.goodput_since_s) if progress is not None else None,
        "checkpoint_step": progress.checkpoint_step if progress is not None else None,
        "checkpoint_age_s": _rounded(view.checkpoint_age_s),
        "min_nodes": world.min_nodes if world is not None else None,
        "max_nodes": world.max_nodes if world is not None else None,
        "replica_size": world.replica_size if world is not None else None,
        "leader": view.leader.node_id if view.leader is not None else None,
        "nodes": [_node(view, node) for node in (*view.members, *view.joining)],
        "incidents": [_incident(b) for b in view.breakages],
        "done": None
        if view.done is None
        else {
            "outcome": view.done.outcome.value,
            "reason": view.done.reason,
            "exit_code": view.done.exit_code,
            "time": round(view.done.time_s, 3),
        },
        "notes": list(view.notes),
    }
    return {name: _shortened(value) for name, value in found.items()}


def node_document(view: JobView, node: Node) -> dict[str, Any]:
    """etcd's records of a live node."""
    found = {
        **_node(view, node),
        "leads": view.leader is not None and view.leader.node_id == node.node_id,
        "liveness_port": node.liveness_port,
        "pid": node.process.pid,
        "host": node.process.host,
        "min_nodes": node.min_nodes,
        "max_nodes": node.max_nodes,
        "replica_size": node.replica_size,
        "tls": node.tls,
        "failure": node.failure,
        "failure_exit_code": node.failure_exit_code,
        "incidents": [_incident(b) for b in view.breakages if node.name in names_in(b)],
    }
    return _described(view, "node", found)


def incident_document(view: JobView, breakage: BreakageRecord) -> dict[str, Any]:
    """etcd's records of an incident."""
    found = {
        **_incident(breakage),
        "lived_s": round(breakage.lived_s, 3),
        "steps": breakage.steps,
        "excluded": breakage.excluded or None,
        "counts": breakage.counts,
        "failures": [
            {"node": failure.node, "exit_code": failure.exit_code, "text": failure.text}
            for failure in breakage.failures
        ],
        "now": sentence(view),
    }
    return _described(view, "incident", found)


def checkpoint_document(view: JobView, step: int) -> dict[str, Any]:
    """etcd's records of the last committed checkpoint, that of ``step``."""
    behind, cost_s = view.behind_checkpoint(step)
    found = {
        "step": step,
        "age_s": _rounded(view.checkpoint_age_s),
        "steps_behind": behind,
        "behind_s": _rounded(cost_s),
    }
    return _described(view, "checkpoint", found)


def names_in(breakage: BreakageRecord) -> frozenset[str]:
    """The nodes that the incident is about."""
    failed = (failure.node for failure in breakage.failures)
    return frozenset((*breakage.lost, *breakage.left, *failed))


def _described(view: JobView, kind: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_id": _shortened(view.run_id),
        "time": round(view.at_s, 3),
        kind: _shortened(found, _LONGEST_DESCRIBED),
    }


def _node(view: JobView, node: Node) -> dict[str, Any]:
    heartbeat = view.heartbeat_of(node)
    is_member = view.world is not None and node.node_id in view.world.node_ids
    first = view.world.first_rank_of(node.node_id) if view.world and is_member else None
    return {
        "name": node.name,
        "node_id": node.node_id,
        "state": node.state.value,
        "is_member": is_member,
        "is_training": view.state_of(node) == JobCondition.TRAINING.value,
        "first_rank": first,
        "nproc": node.nproc,
        "waits": view.why_waiting(node) or None,
        "step": heartbeat.step,
        "heartbeat_age_s": _rounded(heartbeat.age_s),
        "heartbeat_is_late": heartbeat.is_late if heartbeat.age_s is not None else None,
        "generation": node.running.generation if node.running is not None else None,
        "address": node.address,
        "torch": node.torch,
        "library": node.library,
        "joined": round(node.joined_at_s, 3),
    }


def _incident(breakage: BreakageRecord) -> dict[str, Any]:
    return {
        "generation": breakage.generation,
        "time": round(breakage.time_s, 3),
        "what": incident(breakage),
        "lost": list(breakage.lost),
        "left": list(breakage.left),
        "failed": [failure.node for failure in breakage.failures],
        "step": breakage.step,
        "verdict": breakage.verdict,
        "response": breakage.response,
    }


def _shortened(value: Any, limit: int = _LONGEST_TEXT) -> Any:
    if isinstance(value, str):
        return shorten(value, limit)
    if isinstance(value, dict):
        return {name: _shortened(inner, limit) for name, inner in value.items()}
    return [_shortened(inner, limit) for inner in value] if isinstance(value, list) else value


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if value is not None else None
