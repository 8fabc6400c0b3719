"""``elastic describe``: etcd's records of a node or an incident."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from elastic.cli.arguments import (
    CommandParser,
    add_job_arguments,
    add_output,
    find_job,
    nearest,
)
from elastic.cli.status import (
    incident_document,
    names_in,
    node_document,
    ranks_of,
)
from elastic.cli.view import (
    UNKNOWN_CAUSE,
    JobView,
    incident,
    job_store,
    keys_of,
    read_job,
    sentence,
)
from elastic.errors import SYSTEM_CLOCK, ConfigError
from elastic.membership.failures import is_consequence
from elastic.membership.records import BreakageRecord, Node
from elastic.telemetry.log import duration, printable, timestamp
from elastic.telemetry.runs import local_runs
from elastic.tracebacks import exception_line

_LONGEST_LINE = 500
_MAX_LINES = 60  # of a traceback


def main(argv: Sequence[str]) -> int:
    """Run ``elastic describe ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    args.run, args.name = run_and_name(args.kind, args.words, {run.run_id for run in local_runs()})
    run = find_job(args)
    keys = keys_of(args)
    with job_store(args) as store:
        view = read_job(store, keys, SYSTEM_CLOCK.wall())
    if args.output == "json":
        print(json.dumps(description(view, args.kind, args.name), indent=2))
    else:
        journal = run.journal if run is not None else ""
        print("\n".join(describe(view, args.kind, args.name, journal)))
    return 0


def run_and_name(
    kind: str, words: Sequence[str], known_runs: Collection[str]
) -> tuple[str | None, str | None]:
    """The run id and the name in the arguments, in either order. Raises ConfigError.

    >>> run_and_name("incident", ["llama", "3"], ()), run_and_name("incident", ["3"], ())
    (('llama', '3'), (None, '3'))
    >>> run_and_name("incident", ["llama"], ()), run_and_name("node", ["node-1"], ())
    (('llama', None), (None, 'node-1'))
    >>> run_and_name("node", ["node-1", "llama"], ["llama"])
    ('llama', 'node-1')
    """
    if len(words) > 2:
        raise ConfigError(
            f"{len(words)} names are given", hint=f"usage: elastic describe {kind} [RUN] [NAME]"
        )
    if len(words) == 2:
        run, name = words
        is_swapped = name in known_runs and run not in known_runs
        if is_swapped or (kind == "incident" and run.isdecimal() and not name.isdecimal()):
            run, name = name, run
        return run, name
    if not words:
        return None, None
    is_run = words[0] in known_runs or (kind == "incident" and not words[0].isdecimal())
    return (words[0], None) if is_run else (None, words[0])


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic describe``."""
    own = CommandParser(
        prog="elastic describe",
        description="Print what etcd records about a node, or an incident that ended a world.",
        epilog="exit codes: 0 success, 2 usage or not found, 69 etcd unreachable or access denied",
    )
    own.add_argument("kind", type=_kind, metavar="{node,incident}", help="what to describe")
    own.add_argument(
        "words",
        nargs="*",
        metavar="[RUN] [NAME]",
        help="run id (default: PET_RDZV_ID, or the only job of this machine), and the node's name, "
        "or the generation that the incident ended (default: the last incident)",
    )
    add_job_arguments(own, environ, run_help="")
    add_output(own, "text", "json")
    return own


def _kind(text: str) -> str:
    if text not in ("node", "incident"):
        another = ": see elastic checkpoints show FOLDER" if text == "checkpoint" else ""
        raise argparse.ArgumentTypeError(f"{text!r} is neither node nor incident{another}")
    return text


def describe(view: JobView, kind: str, name: str | None, journal: str = "") -> Iterator[str]:
    """The description as text lines. ``journal``: the folder of the job's journals, if it is known.
    Raises ConfigError if the object does not exist."""
    if kind == "node":
        return _node(view, _node_named(view, name))
    return _incident(view, _incident_named(view, name), journal)


def description(view: JobView, kind: str, name: str | None) -> dict[str, Any]:
    """The description as a JSON document. Raises ConfigError if the object does not exist."""
    if kind == "node":
        return node_document(view, _node_named(view, name))
    return incident_document(view, _incident_named(view, name))


def _field(name: str, value: object) -> str:
    return f"{name + ':':<14} {printable(str(value), _LONGEST_LINE)}"


# Nodes -------------------------------------------------------------------------------------------


def _node_named(view: JobView, name: str | None) -> Node:
    names = [node.name for node in view.nodes]
    if name is None:
        raise ConfigError("no node name is given", hint=f"live nodes: {_listed(names)}")
    matches = [node for node in view.nodes if name in (node.name, node.node_id)]
    ended = next((b for b in reversed(view.breakages) if name in names_in(b)), None)
    if not matches and ended is not None:
        raise ConfigError(
            f"node {printable(name, 60)} is not alive: {_ago(view, ended.time_s)}, in generation "
            f"{ended.generation}, {incident(ended)}",
            hint=f"details: elastic describe incident {ended.generation}",
        )
    if not matches:
        raise ConfigError(
            f"there is no live node {printable(name, 60)}{nearest(name, names)}",
            hint=f"live nodes: {_listed(names)}",
        )
    return matches[-1]


def _node(view: JobView, node: Node) -> Iterator[str]:
    yield _field("name", node.name)
    yield _field("node id", node.node_id)
    yield _field("state", view.state_of(node))
    yield _field("ranks", ranks_of(view, node))
    if why := view.why_waiting(node):
        yield _field("waits", why)
    heartbeat = view.heartbeat_of(node)
    yield _field(
        "heartbeat", heartbeat if heartbeat.age_s is not None else "none recorded by the leader"
    )
    yield _field("step", heartbeat.step if heartbeat.step is not None else "unknown")
    yield _field("workers", node.nproc)
    running = node.running.generation if node.running is not None else "none"
    yield _field("generation", running)
    yield _field("leader", "yes" if view.leader and view.leader.node_id == node.node_id else "no")
    yield _field("address", f"{node.address}, liveness port {node.liveness_port}")
    yield _field("process", f"pid {node.process.pid} on {node.process.host}")
    yield _field("joined", f"{timestamp(node.joined_at_s)} ({_ago(view, node.joined_at_s)})")
    yield _field("nnodes", f"{node.min_nodes}:{node.max_nodes}")
    if node.replica_size > 1:
        yield _field("replica size", f"{node.replica_size} ranks")
    yield _field("versions", f"torch {node.torch}, torch-elastic-harness {node.library}")
    yield _field("TLS", "between nodes" if node.tls else "no")
    if node.failure is not None:
        yield _field("last failure", f"exit code {node.failure_exit_code}")
        yield from _indented(node.failure)
    involved = [b for b in view.breakages if node.name in names_in(b)]
    for breakage in reversed(involved):
        yield _field(
            "incident",
            f"{_ago(view, breakage.time_s)}, generation {breakage.generation}: "
            f"{incident(breakage)}",
        )


# Incidents ---------------------------------------------------------------------------------------


def _incident_named(view: JobView, name: str | None) -> BreakageRecord:
    breakages = view.breakages
    known = ", ".join(str(b.generation) for b in breakages)
    if not breakages:
        raise ConfigError(
            f"etcd has no record of an incident of {printable(view.run_id, 80)}",
            hint=f"older ones are in its journals: elastic report {printable(view.run_id, 80)}",
        )
    if name is None:
        return breakages[-1]
    matches = [b for b in breakages if str(b.generation) == name]
    if not matches:
        raise ConfigError(
            f"no incident ended generation {printable(name, 60)}",
            hint=f"incidents are recorded for generation {known}",
        )
    return matches[-1]


def _incident(view: JobView, breakage: BreakageRecord, journal: str) -> Iterator[str]:
    yield _field("generation", breakage.generation)
    what = incident(breakage)
    if what == UNKNOWN_CAUSE and journal:
        from elastic.cli.last_known import in_generation  # reads journals; slow to import

        what = in_generation(journal, view.run_id, breakage.generation) or what
    yield _field("what", what)
    yield _field("when", f"{timestamp(breakage.time_s)} ({_ago(view, breakage.time_s)})")
    yield _field("world lasted", duration(breakage.lived_s))
    if breakage.step is not None:
        yield _field("step", f"{breakage.step} or later, as last reported to the leader")
    if breakage.steps is not None:
        yield _field("progress", f"{breakage.steps} steps since the previous incident")
    if breakage.excluded:
        yield _field("excluded", breakage.excluded)
    if breakage.verdict:
        yield _field("verdict", breakage.verdict)
    if breakage.response:
        yield _field("response", breakage.response)
    yield _field("budget", "counted" if breakage.counts else "not counted")
    yield _field("now", sentence(view))
    lost_peers = [failure for failure in breakage.failures if is_consequence(failure.text)]
    for failure in breakage.failures:
        if failure not in lost_peers:
            yield _field("failure", f"on {failure.node}, exit code {failure.exit_code}")
            if failure.text:
                yield from _indented(failure.text)
    if lost_peers:
        nodes = _listed(list(dict.fromkeys(failure.node for failure in lost_peers)))
        error = exception_line(lost_peers[0].text or "")
        yield _field("lost a peer", f"workers of {nodes}: {error}")


def _indented(text: str) -> Iterator[str]:
    """The last lines of a traceback, which are the most informative."""
    rows = text.splitlines()
    if len(rows) > _MAX_LINES:
        yield f"    … ({len(rows) - _MAX_LINES} lines before)"
    yield from (f"    {printable(row, _LONGEST_LINE)}" for row in rows[-_MAX_LINES:])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(printable(name, 60) for name in names) or "none"


def _ago(view: JobView, time_s: float) -> str:
    return f"{duration(max(0.0, view.at_s - time_s))} ago"
