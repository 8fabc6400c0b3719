"""``elastic list``: the jobs in an etcd."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elastic.cli.arguments import CommandParser, add_etcd_arguments, add_output, options_of
from elastic.cli.view import JobCondition, JobView, Reader, job_store, read_job
from elastic.errors import SYSTEM_CLOCK, ConfigError
from elastic.membership.records import Keys
from elastic.store.keyvalue import Entry, Snapshot
from elastic.telemetry.log import duration, printable
from elastic.telemetry.runs import LocalRun, local_runs

if TYPE_CHECKING:
    from elastic.cli.last_known import RunSummary

SCHEMA = 1  # incremented when a field changes its meaning or is removed
_HEAD = ("RUN ID", "STATE", "NODES", "STEP", "GENERATION", "AGE")


def main(argv: Sequence[str]) -> int:
    """Run ``elastic list ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    if not args.rdzv_endpoint:
        return _list_local(args.output)
    with job_store(args) as store:
        jobs = read_jobs(store, options_of(args).prefix, SYSTEM_CLOCK.wall())
    if args.output == "json":
        print(json.dumps({"schema": SCHEMA, "jobs": [_document(job) for job in jobs]}, indent=2))
    else:
        print("\n".join(_table(jobs)) if jobs else "there is no job")
    return 0


def _list_local(output: str) -> int:
    """The jobs that have had an agent of this user on this machine, newest first."""
    from elastic.cli.last_known import summary  # reads journals; slow to import

    now_s = SYSTEM_CLOCK.wall()
    jobs = [(run, summary(run.journal, run.run_id)) for run in local_runs()]
    if output == "json":
        local = [{**asdict(run), **asdict(known)} for run, known in jobs]
        print(json.dumps({"schema": SCHEMA, "local": local}, indent=2))
        return 0
    head = ("RUN ID", "STATE", "NODES", "STEP", "SCRIPT", "STARTED", "FOLDER")
    rows: list[tuple[str, ...]] = [head]
    for run, known in jobs:
        row = (
            run.run_id,
            _local_state(run, known),
            "" if known.nodes is None else str(known.nodes),
            "" if known.step is None else str(known.step),
            run.script,
            f"{duration(max(0.0, now_s - run.since_s))} ago",
            run.folder,
        )
        rows.append(tuple(map(printable, row)))
    print("\n".join(_aligned(rows)) if jobs else "no job has run on this machine")
    return 0


def _local_state(run: LocalRun, known: RunSummary) -> str:
    if run.is_running:
        return "running"
    if known.outcome == "success":
        return JobCondition.SUCCEEDED.value
    if known.outcome:
        return f"{JobCondition.FAILED.value} ({known.exit_code})"
    return "ended here"  # it was interrupted, or goes on elsewhere


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic list``."""
    own = CommandParser(
        prog="elastic list",
        description="List the jobs in an etcd, ended ones included, until `elastic forget`. "
        "Without an endpoint: the jobs of this user on this machine. Changes nothing.",
        epilog="exit codes: 0 success, 2 usage, 69 etcd unreachable, or access denied",
    )
    add_etcd_arguments(own, environ)
    add_output(own, "table", "json")
    return own


def read_jobs(store: Reader, prefix: str, now_s: float) -> list[JobView]:
    """All jobs under ``prefix``, by run id, from one snapshot."""
    folder = prefix.rstrip("/") + "/"
    snapshot = _Listing(store.list(folder))
    names = {entry.key.removeprefix(folder).partition("/")[0] for entry in snapshot.entries}
    jobs = []
    for name in sorted(names):
        try:
            keys = Keys.of(prefix, name)
        except ConfigError:
            continue  # another program's key
        job = read_job(snapshot, keys, now_s)
        if job.state is not JobCondition.ABSENT:
            jobs.append(job)
    return jobs


class _Listing:
    """A snapshot, to read jobs from."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.entries = snapshot.entries
        self._by_key = {entry.key: entry for entry in snapshot.entries}

    def get(self, key: str) -> Entry | None:
        return self._by_key.get(key)

    def list(self, prefix: str) -> Snapshot:
        inside = tuple(entry for entry in self.entries if entry.key.startswith(prefix))
        return Snapshot(self._snapshot.revision, inside)


def _table(jobs: Sequence[JobView]) -> Iterator[str]:
    return _aligned([_HEAD, *map(_row, jobs)])


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()


def _row(job: JobView) -> tuple[str, ...]:
    known = _document(job)
    age_s = known["age_s"]
    nodes = f"{known['nodes']}/{known['max_nodes']}" if known["max_nodes"] else str(known["nodes"])
    return (
        printable(job.run_id),
        known["state"],
        nodes,
        "" if known["step"] is None else str(known["step"]),
        "" if known["generation"] is None else str(known["generation"]),
        "" if age_s is None else duration(age_s),
    )


def _document(job: JobView) -> dict[str, Any]:
    """``age_s``: since the job's end or, before it, since its newest world formed."""
    world, done = job.world, job.done
    since_s = done.time_s if done is not None else world.time_s if world is not None else None
    step = done.final_step if done is not None else job.step
    return {
        "run_id": job.run_id,
        "state": job.state.value,
        "nodes": len(job.nodes),
        "max_nodes": world.max_nodes if world is not None else None,
        "step": step,
        "generation": world.generation if world is not None else None,
        "age_s": None if since_s is None else round(max(0.0, job.at_s - since_s), 3),
    }
