"""Runs the operations of one backend over all nodes: group by group, in step on every node.

After each group all nodes exchange the results of their ranks. If any has failed, all nodes start
new processes for the next group: so one hanging operation does not hide the results of others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic.doctor.collectives import mpi, outcomes
from elastic.doctor.collectives.outcomes import ENDED, RUNNING, RankOutcome, Result, Speed
from elastic.doctor.collectives.ranks import RankLayout, Ranks
from elastic.doctor.findings import Finding, Status, failed, ok, skipped, warning
from elastic.doctor.meeting import AllGather, Participant
from elastic.node.ports import PortReserve
from elastic.tuning.doctor_intervals import DOCTOR_EXCHANGE_MARGIN_S, DOCTOR_START_S

# Listed here, too: their functions live in a module that imports torch.
OPERATIONS = (
    "send/recv",
    "isend/irecv",
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "scatter",
    "gather",
    "all_to_all",
    "barrier",
    "new_group",
)


@dataclass(frozen=True, kw_only=True)
class TransferMeasurement:
    """One row of the table of speeds, between rank 0 and ``peer``."""

    backend: str
    peer: int
    size_bytes: int
    torch_ms: float
    raw_ms: float


@dataclass(frozen=True)
class Session:
    """The nodes, this node's number, and their communication. ``shared``: a shared folder."""

    members: tuple[Participant, ...]
    number: int
    exchange: AllGather
    silence_s: float
    shared: str | None
    say: Callable[[str], None]

    @property
    def size(self) -> int:
        return sum(member.nproc for member in self.members)

    def layout(self, backend: str) -> RankLayout:
        addresses = tuple(m.address for m in self.members for _ in range(m.nproc))
        me = self.members[self.number]
        return RankLayout(
            backend=backend,
            first_rank=sum(m.nproc for m in self.members[: self.number]),
            local=me.nproc,
            addresses=addresses,
            node=me.name if len(self.members) > 1 else "",
        )


class NodeMissing(Exception):
    """A node has left during the session. ``progress``: of all ranks."""

    def __init__(self, progress: tuple[RankOutcome, ...]) -> None:
        super().__init__("a node is missing")
        self.progress = progress


def torch_findings(session: Session) -> tuple[list[Finding], list[TransferMeasurement]]:
    """Run on gloo, on NCCL if every rank has its own GPU, and on MPI if torch has it."""
    if session.size < 2:
        return [
            skipped("process group", "only one rank: pass --nproc-per-node=2 or --nnodes=2")
        ], []
    backend = _Backend(session, "gloo")
    try:
        found, measured, builds = backend.run()
    finally:
        backend.close()
    found += _equal_builds(builds)
    for number, build in sorted(builds.items()):
        member = session.members[number]
        node = member.name if len(session.members) > 1 else ""
        found += [replace(one, node=node) for one in gpu_findings(build)]
    reason = _why_no_nccl(session, builds)
    if reason:
        found.append(skipped("nccl operations", reason))
    else:
        backend = _Backend(session, "nccl")
        try:
            nccl_found, nccl_measured, _ = backend.run()
        finally:
            backend.close()
        found, measured = found + nccl_found, measured + nccl_measured
    has_mpi = any(build["mpi"] for build in builds.values())
    return [*found, *_on_mpi(session, has_mpi=has_mpi)], measured


def _on_mpi(session: Session, *, has_mpi: bool) -> list[Finding]:
    if why := mpi.why_not(has_mpi=has_mpi, nodes=len(session.members)):
        return [skipped(mpi.NAME, why)]
    session.say("mpi: operations")
    return mpi.examine(session.size, OPERATIONS, session.silence_s)


def gpu_findings(build: Mapping[str, Any]) -> list[Finding]:
    """Whether torch sees a node's GPUs, and whether they compute; nothing without GPUs."""
    name, count = "GPUs in torch", build["gpus"]
    if build["gpu_errors"]:
        remedy = "`nvidia-smi -q`, `dmesg | grep Xid`; reset or replace the device"
        return [failed(name, "; ".join(build["gpu_errors"]), remedy)]
    if count:
        return [ok(name, f"{count}, each computes a test product correctly")]
    if not build["has_driver"]:
        return []
    cuda = f"built for CUDA {build['cuda']}" if build["cuda"] else "built without CUDA"
    return [
        warning(
            name,
            f"none, although a driver is installed: torch {build['torch']} is {cuda}",
            "install a torch for this driver's CUDA, and check CUDA_VISIBLE_DEVICES",
        )
    ]


def _why_no_nccl(session: Session, builds: Mapping[int, Mapping[str, Any]]) -> str:
    if len(builds) < len(session.members):
        return "the ranks did not start"
    if not all(build["nccl"] for build in builds.values()):
        return "torch is built without NCCL"
    for number, build in builds.items():
        if build["gpus"] < session.members[number].nproc:
            where = f" on {session.members[number].name}" if len(session.members) > 1 else ""
            return f"{build['gpus']} GPUs for {session.members[number].nproc} ranks{where}"
    return ""


def _equal_builds(builds: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Compare NCCL and CUDA versions, which are part of torch."""
    if len(builds) < 2:
        return []
    name = "equal NCCL and CUDA"
    texts = {
        number: f"torch {b['torch']}, CUDA {b['cuda'] or 'none'}, NCCL {b['nccl'] or 'none'}"
        for number, b in sorted(builds.items())
    }
    if len(set(texts.values())) == 1:
        return [ok(name, next(iter(texts.values())))]
    measured = "; ".join(f"node {number}: {text}" for number, text in texts.items())
    return [failed(name, measured, "use one image on all nodes")]


class _Backend:
    """One backend's groups of operations."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name
        self._ranks: Ranks | None = None
        self._starts = 0

    def run(self) -> tuple[list[Finding], list[TransferMeasurement], dict[int, Mapping[str, Any]]]:
        """Run all groups; returns findings, speeds and the build facts of every node's torch."""
        found: list[Finding] = []
        speeds: list[TransferMeasurement] = []
        builds: dict[int, Mapping[str, Any]] = {}
        for group, expected in self._groups():
            self._session.say(f"{self._name}: {group}")
            if self._ranks is None:
                builds, problem = self._start()
                if problem is not None:
                    return [*found, problem], speeds, builds
            try:
                progress = self._run_group(group)
            except NodeMissing as missing:
                self.close()
                found += self._findings(group, expected, missing.progress)
                found.append(
                    skipped(f"{self._name} after that", "a node has left: start the doctor again")
                )
                return found, speeds, builds
            of_group = self._findings(group, expected, progress)
            found += of_group
            has_no_group = all(one.status is not Status.OK for one in of_group)
            if group == "initialisation" and has_no_group:
                self.close()
                why = "no process group can be created: see the remedy above"
                found.append(skipped(f"{self._name} after that", why))
                break
            speeds += [self._measured(speed) for p in progress for speed in p.speeds]
        self.close()
        if not self._session.shared:
            found.append(skipped(f"{self._name} init file://", "no shared folder (--checkpoints)"))
        return found, speeds, builds

    def close(self) -> None:
        """End this node's ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _groups(self) -> list[tuple[str, Sequence[str]]]:
        return [
            ("initialisation", self._initialisations()),
            ("operations", OPERATIONS),
            ("speed", ("speed",)),
        ]

    def _initialisations(self) -> list[str]:
        return ["init env://", "init tcp://"] + (["init file://"] if self._session.shared else [])

    def _start(self) -> tuple[dict[int, Mapping[str, Any]], Finding | None]:
        self._starts += 1
        self._ranks = Ranks(self._session.layout(self._name))
        is_ready = self._ranks.wait_until_ready()
        own = {
            "build": self._ranks.builds[0] if is_ready else None,
            "why": "" if is_ready else _why_not_ready(self._ranks.progress()),
        }
        everyone = self._session.exchange(
            f"{self._name} ready {self._starts}", own, DOCTOR_START_S + DOCTOR_EXCHANGE_MARGIN_S
        )
        builds = {n: v["build"] for n, v in everyone.items() if v["build"] is not None}
        if len(builds) == len(self._session.members):
            return builds, None
        return builds, self._not_started(everyone)

    def _not_started(self, everyone: Mapping[int, Any]) -> Finding:
        self.close()
        whys = []
        for number, member in enumerate(self._session.members):
            where = f"node {member.name}: " if len(self._session.members) > 1 else ""
            if number not in everyone:
                whys.append(f"{where}it no longer answers")
            elif everyone[number]["why"]:
                whys.append(f"{where}{everyone[number]['why']}")
        return failed(
            f"{self._name} start",
            f"not all ranks have started: {'; '.join(whys)}",
            "run `python -c 'import torch'` there; check its load and memory",
        )

    def _run_group(self, group: str) -> tuple[RankOutcome, ...]:
        session = self._session
        assert self._ranks is not None
        with contextlib.ExitStack() as held:
            ports: tuple[int, ...] = ()
            if session.number == 0:
                reserve = PortReserve(2)
                held.callback(reserve.close)
                ports = reserve.ports
            label = f"{self._name} {group}"
            served = session.exchange(f"{label} ports", ports, session.silence_s)
            if 0 not in served:
                raise NodeMissing(self._of_missing(served.keys()))
            methods = self._methods(group, served[0])
            own = self._ranks.run(group, methods, self._silence_s(group))
            within_s = self._silence_s(group) + DOCTOR_EXCHANGE_MARGIN_S
            everyone = session.exchange(f"{label} outcome", [asdict(p) for p in own], within_s)
        if len(everyone) < len(session.members):
            raise NodeMissing(_merged(everyone) + self._of_missing(everyone.keys()))
        progress = _merged(everyone)
        if any(not p.is_done or p.error for p in progress):
            self.close()  # the ranks are out of step: the next group starts new ones
        return progress

    def _silence_s(self, group: str) -> float:
        """The longest silence of a rank: in the group ``speed``, all but two ranks wait."""
        pairs = max(self._session.size - 1, 1) if group == "speed" else 1
        return self._session.silence_s * pairs

    def _methods(self, group: str, ports: Sequence[int]) -> list[str]:
        address = self._session.members[0].address
        host = f"[{address}]" if ":" in address else address
        if group != "initialisation":
            return [f"tcp://{host}:{ports[0]}"]
        methods = [f"env://{host}:{ports[0]}", f"tcp://{host}:{ports[1]}"]
        if self._session.shared:
            methods.append(f"file://{self._session.shared}/{self._name}-{self._starts}")
        return methods

    def _of_missing(self, there: Any) -> tuple[RankOutcome, ...]:
        """The ranks of nodes that have not answered."""
        found: list[RankOutcome] = []
        first = 0
        for number, member in enumerate(self._session.members):
            if number not in there:
                found += [
                    RankOutcome(
                        rank=first + local,
                        node=member.name,
                        pid=0,
                        state=ENDED,
                        how_ended="no longer answers: its doctor has ended or is stopped",
                    )
                    for local in range(member.nproc)
                ]
            first += member.nproc
        return tuple(found)

    def _findings(
        self, group: str, expected: Sequence[str], progress: Sequence[RankOutcome]
    ) -> list[Finding]:
        waited_s = self._silence_s(group)
        found = outcomes.findings(self._name, progress, expected, waited_s)
        if group == "speed" and found[0].status is Status.OK:
            is_one = len({m.address for m in self._session.members}) == 1
            found = outcomes.of_speed(self._name, progress, is_one_machine=is_one)
            found += outcomes.of_memory(self._name, progress)
        return found

    def _measured(self, speed: Speed) -> TransferMeasurement:
        return TransferMeasurement(
            backend=self._name,
            peer=speed.peer,
            size_bytes=speed.size,
            torch_ms=speed.torch_ms,
            raw_ms=speed.raw_ms,
        )


def _why_not_ready(ranks: Sequence[RankOutcome]) -> str:
    ended = [f"{p.name} {p.how_ended or f'is {p.state}'}" for p in ranks if p.state != RUNNING]
    return ", ".join(ended) or "torch is still starting"


def _merged(everyone: Mapping[int, Any]) -> tuple[RankOutcome, ...]:
    """The ranks of all nodes, in order."""
    found = [_progress(value) for values in everyone.values() for value in values]
    return tuple(sorted(found, key=lambda progress: progress.rank))


def _progress(value: Mapping[str, Any]) -> RankOutcome:
    results = tuple(Result(**one) for one in value["results"])
    speeds = tuple(Speed(**one) for one in value["speeds"])
    return RankOutcome(**{**value, "results": results, "speeds": speeds})
