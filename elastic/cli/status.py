"""``elastic status``: the state of a job as a table, a sentence, and JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic.cli.arguments import (
    CommandParser,
    add_job_arguments,
    add_output,
    find_job,
    nearest,
    options_of,
)
from elastic.cli.jobs import read_jobs
from elastic.cli.view import (
    GONE_CONNECT_S,
    JobCondition,
    JobView,
    Reader,
    incident,
    job_store,
    keys_of,
    read_job,
    sentence,
)
from elastic.errors import SYSTEM_CLOCK, StoreRefused, StoreUnreachable
from elastic.membership.records import BreakageRecord, Keys, Node
from elastic.telemetry.log import duration, printable, shorten
from elastic.telemetry.runs import is_loopback

# Refresh interval of `elastic status --watch`: each refresh is one read of a few keys.
STATUS_WATCH_S = 2.0

# ----------------------------------------------------------------------------
# A job's status as JSON: the documents of ``elastic status -o json``, ``/api/status`` and
# ``elastic describe -o json``.
#
# docs/reference/status.md lists the fields, and tests compare the two.

_LONGEST_TEXT = 1000  # characters: a reason may be a traceback of a megabyte
_LONGEST_DESCRIBED = 16_384  # in `elastic describe`: a traceback of many ranks
SCHEMA = 1  # incremented when a field changes its meaning or is removed


def document(view: JobView) -> dict[str, Any]:
    """The document. Times are Unix times, durations seconds."""
    world, progress = view.world, view.progress
    goodput = view.goodput
    fields = {
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
        "incidents": [_incident(b) for b in view.incidents],
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
    return {name: _shortened(value) for name, value in fields.items()}


def node_document(view: JobView, node: Node) -> dict[str, Any]:
    """etcd's records of a live node."""
    fields = {
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
        "incidents": [_incident(b) for b in view.incidents if node.name in names_in(b)],
    }
    return _described(view, "node", fields)


def incident_document(view: JobView, breakage: BreakageRecord) -> dict[str, Any]:
    """etcd's records of an incident."""
    fields = {
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
    return _described(view, "incident", fields)


def names_in(breakage: BreakageRecord) -> frozenset[str]:
    """The nodes that the incident is about."""
    failed = (failure.node for failure in breakage.failures)
    return frozenset((*breakage.lost, *breakage.left, *failed))


def _described(view: JobView, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_id": _shortened(view.run_id),
        "time": round(view.at_s, 3),
        kind: _shortened(fields, _LONGEST_DESCRIBED),
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


# ----------------------------------------------------------------------------
# ``elastic status``: a job's status in one sentence and a table, from etcd alone.

ABSENT = 1  # exit code: no such job
_CLEAR = "\x1b[H\x1b[2J"


def main(argv: Sequence[str]) -> int:
    """Run ``elastic status ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    run = find_job(args, or_last=True)
    if not args.journal and run is not None:
        args.journal = run.journal
    # Nothing of the job can run any more: its etcd was on this machine, as all its agents.
    is_gone = (
        run is not None and not run.is_running and is_loopback(run.endpoint) and not args.watch
    )
    if is_gone and "connect_timeout_s" not in args.rdzv_conf:
        args.rdzv_conf += f",connect_timeout_s={GONE_CONNECT_S:g}"
    keys = keys_of(args)
    while True:
        try:
            return _from_store(args, keys, is_gone=is_gone)
        except StoreUnreachable as error:
            _show_last_known(args, keys.run_id)
            if is_gone:
                return 0
            if not args.watch:
                raise
            print(f"elastic: {error.message}", file=sys.stderr)
            SYSTEM_CLOCK.sleep(STATUS_WATCH_S)


def _from_store(args: argparse.Namespace, keys: Keys, *, is_gone: bool) -> int:
    with job_store(args, reports_delay=not is_gone) as store:
        view = read_job(store, keys, SYSTEM_CLOCK.wall())
        if view.state is JobCondition.ABSENT and is_gone:  # another etcd has its port
            _show_last_known(args, keys.run_id)
            return 0
        _show(view, args)
        if view.state is JobCondition.ABSENT:
            _say_which_exist(store, args, view)
        while args.watch:
            SYSTEM_CLOCK.sleep(STATUS_WATCH_S)
            try:
                view = read_job(store, keys, SYSTEM_CLOCK.wall())
            except StoreUnreachable as error:
                _show_outage(view, args, error.message)
                continue
            _show(view, args)
    return ABSENT if view.state is JobCondition.ABSENT else 0


def _say_which_exist(store: Reader, args: argparse.Namespace, view: JobView) -> None:
    """Name the jobs that exist: the run id may be misspelled."""
    try:
        names = [job.run_id for job in read_jobs(store, options_of(args).prefix, view.at_s)]
    except StoreRefused:  # this user may only read its own job
        return
    if names:
        jobs = "1 job" if len(names) == 1 else f"{len(names)} jobs"
        text = f"this etcd has {jobs} (elastic list){nearest(view.run_id, names)}"
        print(f"elastic: {text}", file=sys.stderr)


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic status``."""
    own = CommandParser(
        prog="elastic status",
        description="Print a job's status: its state in one sentence, its step and its nodes. "
        "Reads etcd, and after the end of an etcd on this machine the job's journals. Changes "
        "nothing.",
        epilog="exit codes: 0 success, 1 no such job, 2 usage, 69 etcd unreachable, or access "
        "denied",
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--journal",
        default=environ.get("ELASTIC_JOURNAL"),
        metavar="FOLDER",
        help="journal folder; used to show the last known state when etcd is unreachable "
        "(default: ELASTIC_JOURNAL, or that of the job on this machine)",
    )
    own.add_argument("-w", "--watch", action="store_true", help="refresh until Ctrl-C")
    add_output(own, "table", "wide", "json")
    return own


def _show(view: JobView, args: argparse.Namespace) -> None:
    if args.output == "json":
        print(json.dumps(document(view), indent=None if args.watch else 2), flush=True)
        return
    journals = _journals_of(view, args)
    _print([*lines(view, is_wide=args.output == "wide"), *journals], args)
    for note in view.notes:
        print(f"elastic: note: {printable(note, 500)}", file=sys.stderr)


def _show_outage(view: JobView, args: argparse.Namespace, message: str) -> None:
    """Print the last status and its age after etcd became unreachable during --watch."""
    print(f"elastic: {printable(message, 500)}", file=sys.stderr)
    if args.output != "json":
        ago = duration(max(0.0, SYSTEM_CLOCK.wall() - view.at_s))
        head = f"etcd does not answer; status {ago} ago:"
        _print([head, *lines(view, is_wide=args.output == "wide")], args)


def _show_last_known(args: argparse.Namespace, run_id: str) -> None:
    if not args.journal:
        print("elastic: --journal FOLDER would show the last known state", file=sys.stderr)
        return
    from elastic.cli.last_known import last_known  # reads journals; slow to import

    known = last_known(args.journal, run_id, SYSTEM_CLOCK.wall())
    known[0] = f"{printable(run_id)}: {known[0]}"
    if args.output != "json":
        _print(known, args)
    else:
        print("\n".join(known), file=sys.stderr)


def _journals_of(view: JobView, args: argparse.Namespace) -> list[str]:
    """What the journals record of a job that is down: the leader's record in etcd has expired."""
    if view.state is not JobCondition.DOWN or not args.journal:
        return []
    from elastic.cli.last_known import last_known  # reads journals; slow to import

    return ["", "from the journals:", *last_known(args.journal, view.run_id, SYSTEM_CLOCK.wall())]


def _print(text: Iterable[str], args: argparse.Namespace) -> None:
    clear = _CLEAR if args.watch and sys.stdout.isatty() else ""
    print(clear + "\n".join(text), flush=True)


# For people --------------------------------------------------------------------------------------


def lines(view: JobView, *, is_wide: bool = False) -> Iterator[str]:
    """The sentence, the known progress, and the nodes."""
    yield f"{printable(view.run_id)}: {sentence(view)}"
    yield from _progress(view)
    if view.nodes:
        yield ""
        rows = [_HEAD + _WIDE_HEAD * is_wide, *_rows(view, is_wide=is_wide)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield "   ".join(cells).rstrip()
    broken = view.incidents[-5:]
    if broken:
        yield ""
        yield "recent incidents:"
        for breakage in reversed(broken):
            ago = duration(max(0.0, view.at_s - breakage.time_s))
            yield f"  {ago} ago, generation {breakage.generation}: {incident(breakage)}"


def _progress(view: JobView) -> Iterator[str]:
    if parts := list(progress(view)):
        yield ", ".join(parts)


def progress(view: JobView) -> Iterator[str]:
    """The known progress: step, rate, time left, goodput and checkpoint."""
    known = view.progress
    if view.step is not None:
        planned = known.planned_steps if known is not None else None
        or_later = " or later" if view.is_step_old else ""
        yield f"step {view.step}{or_later}" + (f" of {planned}" if planned is not None else "")
    if (rate := view.steps_per_s) is not None:
        yield f"{rate:.3g} steps/s"
    if (eta_s := view.eta_s) is not None:
        yield f"about {duration(eta_s)} left"
    elif view.state is JobCondition.TRAINING:
        yield "time left unknown"
    if (goodput := view.goodput) is not None and known is not None:
        covers = duration(max(0.0, view.at_s - (known.goodput_since_s or view.at_s)))
        yield f"goodput {goodput:.1%} over {covers}"
    if known is not None and known.checkpoint_step is not None:
        age_s = view.checkpoint_age_s
        ago = f", {duration(age_s)} ago" if age_s is not None else ""
        yield f"last checkpoint of step {known.checkpoint_step}{ago}"


_HEAD = ("NODE", "RANKS", "STATE", "AGE")
_WIDE_HEAD = ("STEP", "HEARTBEAT", "ADDRESS", "GENERATION", "LEADER", "TORCH", "LIBRARY", "NODE ID")


def _rows(view: JobView, *, is_wide: bool) -> Iterator[tuple[str, ...]]:
    for node in (*view.members, *view.joining):
        row: tuple[str, ...] = (
            printable(node.name, 60),
            ranks_of(view, node),
            view.state_of(node),
            duration(max(0.0, view.at_s - node.joined_at_s)),
        )
        if is_wide:
            running = str(node.running.generation) if node.running is not None else "-"
            is_leader = "yes" if view.leader and view.leader.node_id == node.node_id else ""
            heartbeat = view.heartbeat_of(node)
            row += (
                str(heartbeat.step) if heartbeat.step is not None else "-",
                str(heartbeat),
                printable(node.address, 60),
                running,
                is_leader,
                printable(node.torch, 30),
                printable(node.library, 30),
                printable(node.node_id, 40),
            )
        yield row


def ranks_of(view: JobView, node: Node) -> str:
    """``0-7`` in the newest world; ``-`` outside of it."""
    if view.world is None or node.node_id not in view.world.node_ids:
        return "-"
    first = view.world.first_rank_of(node.node_id)
    return str(first) if node.nproc == 1 else f"{first}-{first + node.nproc - 1}"
