"""``elastic doctor``: checks whether this machine, etcd and the network are ready for training."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic.child_interpreters import module_command
from elastic.cli.arguments import (
    CommandParser,
    add_job_arguments,
    add_output,
    at_least,
    options_of,
)
from elastic.cli.run import LocalNodes
from elastic.cli.view import table_console
from elastic.doctor import checks
from elastic.doctor.checks import (
    HEALTHY,
    Finding,
    Probe,
    Status,
    Unanswered,
    exit_code,
    failed,
    skipped,
    summary,
)
from elastic.errors import SYSTEM_CLOCK, ConfigError, CoordinationError
from elastic.membership.records import Keys
from elastic.store.client import EtcdConfig, etcd_config
from elastic.store.embedded import find_binary
from elastic.store.etcd import EtcdStore
from elastic.tuning.environment import human
from elastic.tuning.intervals import CLI_POLL_S, DOCTOR_LEASE_S
from elastic.tuning.network import configured_address, read_network
from elastic.tuning.options import AgentOptions

# One check may be silent this long (--deadline). The slowest one, the first NCCL collective of a
# process, takes several seconds.
DOCTOR_DEADLINE_S = 20.0
# How long the nodes wait for each other (--join-timeout): a script or a person starts them.
DOCTOR_JOIN_S = 60.0
# Processes start: the import of torch on a busy machine, in an agent and then in a rank.
DOCTOR_START_S = 120.0
# The other nodes' agents end after this one: their keys are removed then.
DOCTOR_LAST_NODE_S = 10.0

Say = Callable[[str], None]

_COLOURS = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "bold red",
    Status.SKIPPED: "dim",
}


def main(argv: Sequence[str]) -> int:
    """Run ``elastic doctor ARGV``; returns 0 if no check failed, else 1."""
    args = parser().parse_args(argv)
    report = examine(_plan(args), _say)
    if args.output == "json":
        print(json.dumps(as_json(report), indent=1))
    else:
        _print_tables(report)
    return exit_code(report.findings)


def as_json(report: Report) -> dict[str, object]:
    """The document that ``-o json`` prints."""
    return {
        "healthy": exit_code(report.findings) == HEALTHY,
        "nodes": list(report.nodes),
        "findings": [{**asdict(f), "status": f.status.value} for f in report.findings],
        "speeds": list(report.speeds),
    }


def _say(text: str) -> None:
    """Progress messages for an interactive terminal."""
    if sys.stderr.isatty():
        print(f"elastic: {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------
# The examination: this machine and etcd here, everything between ranks and nodes as a job
# (elastic/doctor/collectives.py).


@dataclass(frozen=True, kw_only=True)
class ExaminationPlan:
    """The options of an examination."""

    options: AgentOptions
    conf: str = ""  # the same, as they were given
    endpoint: str | None = None
    run_id: str | None = None
    nnodes: int = 1
    nproc: int = 2
    local_addr: str = ""
    folder: str | None = None
    ports: tuple[int, ...] = ()  # to test between all nodes, in addition to ephemeral ones
    only_local: bool = False  # no process groups
    deadline_s: float = DOCTOR_DEADLINE_S  # of one check. Starts of processes get more.
    join_timeout_s: float = DOCTOR_JOIN_S
    name: str = field(
        default_factory=lambda: os.environ.get("ELASTIC_NODE_NAME") or socket.gethostname()
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings of all nodes, and the measured speeds: rows of backend, peer of rank 0, size_bytes,
    torch_ms and raw_ms."""

    findings: tuple[Finding, ...]
    speeds: tuple[Mapping[str, Any], ...] = ()
    nodes: tuple[str, ...] = ()


def examine(plan: ExaminationPlan, say: Say) -> Report:
    """Run every check. Never raises for a finding. Raises ConfigError for invalid options."""
    keys = Keys.of(plan.options.prefix, plan.run_id or f"doctor-{secrets.token_hex(4)}")
    config = etcd_config(plan.endpoint, plan.options) if plan.endpoint else None
    first = config.endpoints[0] if config else None
    probes = _start_probes(plan, (first.host, first.port) if first else ("", 0))
    say("checking this machine")
    findings = checks.of_certificates(checks.own_certificates(plan.options))
    if config is None:
        findings.append(skipped("etcd", "no --rdzv-endpoint"))
    else:
        say(f"checking etcd at {plan.endpoint}")
        facts = checks.inspect(config, keys.root)
        findings = checks.of_etcd(facts) + findings
        if not facts.reachable:
            config = None  # etcd cannot be used further
    results = {name: probe.result() for name, probe in probes.items()}
    findings += _of_machine(plan, results)
    own = Report(findings=tuple(findings), nodes=(plan.name,))
    if plan.nnodes == 1 and (plan.only_local or plan.nproc == 1):
        return own if plan.only_local else _with(own, skipped(_NO_GROUP, _ONE_RANK))
    if plan.nnodes > 1 and config is None:
        return _with(own, skipped("other nodes", "nodes find each other through etcd"))
    if config is None:
        try:
            find_binary()
        except ConfigError as error:
            return _with(own, skipped(_NO_GROUP, f"no --rdzv-endpoint, and {error.message}"))
    say(f"running a job on {plan.nnodes} nodes: the checks between ranks")
    with tempfile.TemporaryDirectory(prefix="elastic-doctor-") as folder:
        _write_given(Path(folder), plan, own, results)
        try:
            with _session(config, keys) as session:
                return _run_job(plan, session, Path(folder), own, say)
        except CoordinationError as error:
            return _with(own, failed("other nodes", error.message, error.hint or "check etcd"))


_NO_GROUP = "process group"  # the name of the check before the first one of the job
_FAILED_GROUPS = 3  # worlds in a row
_ONE_RANK = "only one rank: pass --nproc-per-node=2 or --nnodes=2"


def _with(report: Report, finding: Finding) -> Report:
    return replace(report, findings=(*report.findings, finding))


def _start_probes(plan: ExaminationPlan, endpoint: tuple[str, int]) -> dict[str, Probe]:
    options = plan.options
    address = configured_address(plan.local_addr, options.network)
    wanted: dict[str, Sequence[object]] = {"network": (address, *endpoint)}
    wanted |= dict.fromkeys(("shm", "limits", "gpu", "versions"), ())
    if plan.folder:
        wanted["folder"] = (plan.folder,)
    return {name: Probe(name, a, deadline_s=plan.deadline_s) for name, a in wanted.items()}


def _of_machine(plan: ExaminationPlan, results: Mapping[str, Any]) -> list[Finding]:
    findings = [
        *checks.of_network(results["network"]),
        *checks.of_link_speeds(results["network"], read_network()),
        checks.of_shm(results["shm"]),
        *checks.of_limits(results["limits"]),
        *checks.of_gpu(results["gpu"]),
        checks.of_versions(results["versions"]),
    ]
    if plan.folder:
        return [*findings, *checks.of_folder(plan.folder, results["folder"])]
    return [*findings, skipped("checkpoint folder", "no --checkpoints")]


def _write_given(
    folder: Path, plan: ExaminationPlan, own: Report, results: Mapping[str, Any]
) -> None:
    """What the script on this node has to know."""
    # A folder that did not answer a child process would block the script.
    answers = not isinstance(results.get("folder"), Unanswered)
    given = {
        "name": plan.name,
        "host_name": socket.gethostname(),
        "address": getattr(results["network"], "address", "") or "127.0.0.1",
        "folder": plan.folder if answers else None,
        "ports": plan.ports,
        "only_local": plan.only_local,
        "deadline_s": plan.deadline_s,
        "findings": as_json(own)["findings"],
        "facts": {
            "python": getattr(results["versions"], "python", "unknown"),
            "torch-elastic-harness": getattr(results["versions"], "library", "unknown"),
            "GPU driver": getattr(results["gpu"], "driver", "unknown") or "none",
            "MTU": getattr(results["network"], "mtu", "unknown"),
        },
    }
    (folder / "given.json").write_text(json.dumps(given))


@contextlib.contextmanager
def _session(config: EtcdConfig | None, keys: Keys) -> Iterator[Keys]:
    """The keys of one examination's job, below those of the run: the first node names it, and
    removes them when all agents have ended. Raises CoordinationError."""
    if config is None:
        yield Keys.of("/elastic", "doctor")  # in an etcd of its own
        return
    prefix, name = keys.root.rstrip("/"), f"doctor-{secrets.token_hex(4)}"
    with contextlib.closing(EtcdStore(checks.quick(config))) as store:
        lease = store.lease(DOCTOR_LEASE_S)
        key = f"{prefix}/doctor-session"
        is_first = store.compare_and_swap(key, name.encode(), expected_revision=0, lease=lease)
        entry = store.get(key)
        if entry is None:
            raise CoordinationError("another examination has just ended", hint="start it again")
        session = Keys.of(prefix, entry.value.decode())
        yield session
        if is_first is None:
            return
        ends_s = SYSTEM_CLOCK.monotonic() + DOCTOR_LAST_NODE_S
        while store.list(session.nodes).entries and SYSTEM_CLOCK.monotonic() < ends_s:
            SYSTEM_CLOCK.sleep(CLI_POLL_S)
        for entry in store.list(session.root).entries:
            store.delete(entry.key)


def _run_job(plan: ExaminationPlan, session: Keys, folder: Path, own: Report, say: Say) -> Report:
    """This node's part of the job; returns the report of all nodes."""
    journal, lines = folder / "journal", []

    def on_line(node: str, stream: str, line: str) -> None:
        lines.append(line)

    with LocalNodes(on_line) as nodes:
        nodes.start(plan.name, _command(plan, session, folder), _environment(plan, journal))
        # The job itself ends hangs and absent nodes; it would wait for an etcd that has gone.
        silence_s = DOCTOR_START_S + plan.join_timeout_s + 3 * plan.deadline_s
        current, since_s = _NO_GROUP, SYSTEM_CLOCK.monotonic()
        while nodes.running and SYSTEM_CLOCK.monotonic() - since_s < silence_s:
            nodes.pump(CLI_POLL_S)
            with contextlib.suppress(FileNotFoundError):
                if (name := (folder / "current-0").read_text()) != current:
                    current, since_s = name, SYSTEM_CLOCK.monotonic()
                    say(name)
            if current == _NO_GROUP and len(_group_errors(journal)) >= _FAILED_GROUPS:
                break
        is_silent = SYSTEM_CLOCK.monotonic() - since_s >= silence_s
        nodes.drain()
    try:
        saved = json.loads((folder / "report.json").read_text())
    except FileNotFoundError:
        saved = {**as_json(own), "is_complete": False}
    report = Report(
        findings=tuple(
            Finding(**{**one, "status": Status(one["status"])}) for one in saved["findings"]
        ),
        speeds=tuple(saved["speeds"]),
        nodes=tuple(saved["nodes"]),
    )
    if saved["is_complete"]:
        return report
    if is_silent:
        return _with(report, checks.broken(current, f"no result within {silence_s:g} s"))
    return _with(report, _of_end(current, journal, lines))


def _command(plan: ExaminationPlan, session: Keys, folder: Path) -> list[str]:
    """``elastic run`` of the script, on this node."""
    prefix, _, run_id = session.root.rstrip("/").rpartition("/")
    conf = {
        "prefix": prefix,
        "hang_script_timeout_s": f"{plan.deadline_s:g}",
        "hang_timeout_s": f"{min(plan.deadline_s, plan.options.hang_timeout_s):g}",
        "join_timeout_s": f"{plan.join_timeout_s:g}",
        # No check is repeated; without a process group the job forms one world after another.
        "failure_budget": "5",
    }
    given = [
        p for p in plan.conf.split(",") if p.strip() and p.partition("=")[0].strip() not in conf
    ]
    where = (
        [f"--rdzv-endpoint={plan.endpoint}"]
        if plan.endpoint and session.root != Keys.of("/elastic", "doctor").root
        else ["--embedded-etcd"]
    )
    address = [f"--local-addr={plan.local_addr}"] if plan.local_addr else []
    flags = [
        *(f"--nnodes={plan.nnodes}", f"--nproc-per-node={plan.nproc}", f"--rdzv-id={run_id}"),
        *where,
        f"--rdzv-conf={','.join([*given, *(f'{k}={v}' for k, v in conf.items())])}",
        *address,
        *("-m", "elastic.doctor.collectives", str(folder)),
    ]
    return module_command("elastic.cli.main", ["run", *flags])


# Variables of an outer launcher, which this job must not inherit.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _environment(plan: ExaminationPlan, journal: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in _LAUNCHER and not k.startswith("PET_")}
    kept.pop("ELASTIC_CHECKPOINTS", None)
    kept.setdefault("OMP_NUM_THREADS", "1")
    return {**kept, "ELASTIC_NODE_NAME": plan.name, "ELASTIC_JOURNAL": str(journal)}


def _group_errors(journal: Path) -> list[str]:
    """Errors of process groups that could not be built, one for each world. A job would try again
    for as long as it runs: a link may come back."""
    from elastic.telemetry.reader import read_folder

    errors = {
        record.whole("generation"): text
        for record in read_folder(journal)[0]
        if record.name in ("collective-failed", "world-formed")
        and "GroupBuildFailed" in (text := record.text("error") or record.text("reason"))
    }
    return list(errors.values())


# An error in the output of `elastic run`: printed, or logged; and the line with its hint.
# The commands that show a job, after its end; the remedy follows once more.
_AFTERWARDS = "what happened: elastic events"
_ERROR = re.compile(
    r"^(?:elastic: |\S+ ERROR +\[[^]]*\] )(?P<message>.*)(?:\n  +(?P<hint>.*))?", re.MULTILINE
)


def _of_end(current: str, journal: Path, lines: Sequence[str]) -> Finding:
    """Why the job has ended without a report: the reason that it has recorded, or the error that
    the agent printed, with its hint."""
    from elastic.telemetry.reader import read_folder

    ended = [r.text("reason") for r in read_folder(journal)[0] if r.name == "job-ended"]
    if why := [*_group_errors(journal), *ended][-1:]:
        return checks.broken(current, why[0])
    said = itertools.takewhile(lambda line: _AFTERWARDS not in line, lines)
    errors = list(_ERROR.finditer("\n".join(said)))
    if not errors:
        return checks.broken(current, " ".join(lines[-2:]) or "the job has ended without a result")
    return failed(current, errors[-1]["message"], errors[-1]["hint"] or "start it again")


# The tables ----------------------------------------------------------------------------------


def _print_tables(report: Report) -> None:
    console = table_console()
    several = len(report.nodes) > 1
    console.print(_findings_table(report.findings, several=several))
    if report.speeds:
        console.print(_speeds_table(report))
    console.print(summary(report.findings), highlight=False)


def _findings_table(findings: Sequence[Finding], *, several: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("check", *(["node"] if several else []), "status", "measured, → remedy")
    for one in folded(findings):
        measured = f"{one.measured}\n→ {one.remedy}" if one.remedy else one.measured
        status = Text(one.status.value, style=_COLOURS[one.status])
        table.add_row(
            Text(one.name), *([Text(one.node)] if several else []), status, Text(measured)
        )
    return table


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes into one row: with the first node's name and a count if
    the check passed or was skipped, else with all names."""
    rows: dict[tuple[str, ...], list[Finding]] = {}
    for number, one in enumerate(findings):
        key: tuple[str, ...] = (str(number),)
        if one.node:
            problem = () if _is_fine(one) else (one.measured, one.remedy)
            key = (one.name, one.status.value, *problem)
        rows.setdefault(key, []).append(one)
    return [replace(same[0], node=_nodes_of(same)) for same in rows.values()]


def _is_fine(finding: Finding) -> bool:
    return finding.status in (Status.OK, Status.SKIPPED)


def _nodes_of(same: Sequence[Finding]) -> str:
    if _is_fine(same[0]) and len(same) > 1:
        return f"{same[0].node} +{len(same) - 1}"
    return ", ".join(one.node for one in same)


def _speeds_table(report: Report) -> Any:
    from rich.table import Table

    table = Table(
        *("backend", "ranks", "size", "torch", "raw TCP"),
        title="one way between two ranks",
        title_justify="left",
    )
    for row in report.speeds:
        table.add_row(
            row["backend"],
            f"0-{row['peer']}",
            human(row["size_bytes"]),
            *(
                f"{row[way]:.3f} ms, {row['size_bytes'] / row[way] / 1e6:.3f} GB/s"
                for way in ("torch_ms", "raw_ms")
            ),
        )
    return table


# The command line --------------------------------------------------------------------------------


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic doctor``."""
    parser = CommandParser(
        prog="elastic doctor",
        description="Check this machine, etcd, and every operation of torch.distributed. To check "
        "the connections between N nodes, too, run it with --nnodes=N on each of them.",
        epilog="exit codes: 0 no check failed (there may be warnings), 1 a check failed, "
        "2 usage. The agents' options (certificates, user, prefix) are read from the same "
        "ELASTIC_* variables.",
    )
    add_job_arguments(parser, environ, run_help="")
    parser.add_argument(
        "--nnodes",
        type=at_least(1),
        default=1,
        metavar="N",
        help="number of nodes that run this command (default: 1)",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=at_least(1),
        metavar="N",
        help="processes on this node (default: 2 on one node, 1 on several)",
    )
    parser.add_argument("--local-addr", default="", metavar="ADDR", help="this node's address")
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="also check this checkpoint folder: space, fsync, file://",
    )
    parser.add_argument(
        "--ports",
        default="",
        metavar="PORT,...",
        help="also try these TCP ports between all nodes (MASTER_PORT, for example)",
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="check only the machine and etcd; takes seconds, starts no process groups",
    )
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=ExaminationPlan.deadline_s,
        metavar="S",
        help="timeout for one operation without output (default: %(default)g)",
    )
    parser.add_argument(
        "--join-timeout",
        type=_seconds,
        default=ExaminationPlan.join_timeout_s,
        metavar="S",
        help="how long to wait for the other nodes (default: %(default)g)",
    )
    add_output(parser, "table", "json")
    return parser


def _plan(args: argparse.Namespace) -> ExaminationPlan:
    """The examination that the arguments request. Raises ConfigError."""
    if args.nnodes > 1 and not (args.rdzv_endpoint and args.rdzv_id):
        lacking = "--rdzv-endpoint" if not args.rdzv_endpoint else "--rdzv-id"
        raise ConfigError(
            f"--nnodes={args.nnodes} without {lacking}: the nodes find each other through etcd",
            hint="give all of them the same --rdzv-endpoint=HOST:PORT and --rdzv-id=NAME",
        )
    return ExaminationPlan(
        options=options_of(args),
        conf=args.rdzv_conf,
        endpoint=args.rdzv_endpoint,
        run_id=args.rdzv_id,
        nnodes=args.nnodes,
        nproc=args.nproc_per_node or (2 if args.nnodes == 1 else 1),
        local_addr=args.local_addr,
        folder=args.checkpoints,
        ports=_ports(args.ports),
        only_local=args.local,
        deadline_s=args.deadline,
        join_timeout_s=args.join_timeout,
    )


def _ports(text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    for number in numbers:
        if not (number.isdigit() and 1 <= int(number) <= 65535):
            raise ConfigError(
                f"--ports={text}: {number!r} is not a valid port", hint="--ports=29500,29501"
            )
    return tuple(map(int, numbers))


def _seconds(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not greater than zero")
    return number
