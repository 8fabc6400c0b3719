"""The checks between ranks and nodes: a script under ``elastic run``, one check per step.

``elastic doctor`` starts it as ``elastic run … -m elastic.doctor.collectives FOLDER``. Worlds,
deadlines, replaced ranks, and the name of a rank that hangs are those of every other job: a check
that a world does not survive is not repeated in the next one, and the reason for that world is its
result. ``FOLDER/given.json`` has what the command found on this node; ``FOLDER/report.json`` gets
the findings of all nodes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

import elastic
from elastic.agent.identity import PortReserve
from elastic.doctor import checks, network
from elastic.doctor.checks import Finding, Probe, Status, failed, ok, skipped, warning
from elastic.errors import SYSTEM_CLOCK
from elastic.telemetry.reader import read_folder
from elastic.tuning.environment import human
from elastic.tuning.network import Network, read_network

# A message size whose round trip takes longer ends the series of measurements: the next one is 16
# times as large, and is sent several times, within the deadline of one check.
DOCTOR_SLOW_ROUND_TRIP_S = 0.5
# The raw TCP stream between two ranks, for the comparison with torch: both are about to connect.
DOCTOR_RAW_CONNECT_S = 10.0

COUNT = 1000  # elements of the tensors whose results are checked
SIZES = (4, 256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_MAX_ROUNDS, _BYTES_EACH = 30, 8 << 20
_GPU_SIDE = 256
# Fraction of a plain stream for the largest message between two machines: it has no copies.
_MIN_SHARE_OF_RAW = 0.25
_UNSUPPORTED = ("not support", "not implement", "unsupported")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The context of a check: this rank, all ranks' nodes, and what all nodes were given."""

    rank: int
    size: int
    device: str
    nodes: tuple[Mapping[str, Any], ...]  # what the command found on each, in order of ranks
    node: int  # the number of this rank's node
    is_first: bool  # of its node: the one that checks what concerns nodes
    speeds: list[dict[str, Any]] = field(default_factory=list)  # measured in this check

    def tensor(self, value: float, count: int = COUNT) -> torch.Tensor:
        return torch.full((count,), float(value), device=self.device)

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    @property
    def given(self) -> Mapping[str, Any]:
        """What the command found on this node."""
        return self.nodes[self.node]

    @property
    def names(self) -> list[str]:
        """The nodes' names; two nodes of one machine are distinguished."""
        names = [str(node["name"]) for node in self.nodes]
        return [f"{n}#{i}" if names.count(n) > 1 else n for i, n in enumerate(names)]

    def by_node(self, value: Any) -> dict[int, Any]:
        """The values of the first rank of each node, on all ranks."""
        values = everyone([self.node, value] if self.is_first else None)
        return dict(filter(None, values))


def everyone(value: Any) -> list[Any]:
    """The JSON values of all ranks, in their order. (torch's own would unpickle them.)"""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    cpu = data.device
    sizes = [torch.zeros(1, dtype=torch.int64, device=cpu) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=cpu))
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8, device=cpu) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))))
    return [json.loads(bytes(p[: int(s)].tolist())) for p, s in zip(parts, sizes, strict=True)]


# ----------------------------------------------------------------------------
# The operations: each returns a description of the error in its result, or "".


def wrong(findings: torch.Tensor, expected: float) -> str:
    """A description of the error in a result, or ""."""
    if bool((findings == float(expected)).all()):
        return ""
    off = findings[findings != float(expected)]
    return f"{off.numel()} of {findings.numel()} elements are wrong: {off[0]:g}, not {expected:g}"


def first_wrong(*sentences: str) -> str:
    return next((sentence for sentence in sentences if sentence), "")


def send_recv(me: Rank) -> str:
    """Every pair in both directions: the lower rank sends first."""
    errors = []
    for peer in me.others:
        received = me.tensor(-1)
        if me.rank < peer:
            dist.send(me.tensor(me.rank), peer)
            dist.recv(received, peer)
        else:
            dist.recv(received, peer)
            dist.send(me.tensor(me.rank), peer)
        errors.append(wrong(received, peer))
    return first_wrong(*errors)


def isend_irecv(me: Rank) -> str:
    """A ring: each rank sends to the next one and receives from the previous one."""
    before, after = (me.rank - 1) % me.size, (me.rank + 1) % me.size
    received = me.tensor(-1)
    # In one batch: on NCCL a single send may wait for its receiver.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, me.tensor(me.rank), after),
            dist.P2POp(dist.irecv, received, before),
        ]
    )
    for work in works:
        work.wait()
    return wrong(received, before)


def broadcast(me: Rank) -> str:
    errors = []
    for source in range(me.size):
        tensor = me.tensor(10 + source if me.rank == source else -1)
        dist.broadcast(tensor, source)
        errors.append(wrong(tensor, 10 + source))
    return first_wrong(*errors)


def reduce(me: Rank) -> str:
    tensor = me.tensor(me.rank + 1)
    dist.reduce(tensor, 0)
    return wrong(tensor, _sum_of_ranks(me)) if me.rank == 0 else ""


def all_reduce(me: Rank) -> str:
    total, largest = me.tensor(me.rank + 1), me.tensor(me.rank)
    dist.all_reduce(total)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return first_wrong(wrong(total, _sum_of_ranks(me)), wrong(largest, me.size - 1))


def all_gather(me: Rank) -> str:
    gathered = [me.tensor(-1) for _ in range(me.size)]
    dist.all_gather(gathered, me.tensor(me.rank))
    return first_wrong(*(wrong(tensor, rank) for rank, tensor in enumerate(gathered)))


def reduce_scatter(me: Rank) -> str:
    received = me.tensor(-1)
    dist.reduce_scatter(received, [me.tensor(part + me.rank) for part in range(me.size)])
    return wrong(received, me.size * me.rank + sum(range(me.size)))


def scatter(me: Rank) -> str:
    received = me.tensor(-1)
    parts = [me.tensor(20 + rank) for rank in range(me.size)] if me.rank == 0 else None
    dist.scatter(received, parts, src=0)
    return wrong(received, 20 + me.rank)


def gather(me: Rank) -> str:
    gathered = [me.tensor(-1) for _ in range(me.size)] if me.rank == 0 else None
    dist.gather(me.tensor(me.rank), gathered, dst=0)
    return first_wrong(*(wrong(tensor, rank) for rank, tensor in enumerate(gathered or [])))


def all_to_all(me: Rank) -> str:
    parts = torch.cat([me.tensor(100 * me.rank + peer) for peer in range(me.size)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return first_wrong(
        *(wrong(part, 100 * peer + me.rank) for peer, part in enumerate(received.chunk(me.size)))
    )


def barrier(me: Rank) -> str:
    dist.barrier()
    return ""


def own_groups(me: Rank) -> str:
    """A group of every two neighbours, and one of all ranks in reverse order."""
    errors = []
    for first in range(0, me.size - 1, 2):
        group = dist.new_group([first, first + 1])
        if me.rank in (first, first + 1):
            tensor = me.tensor(me.rank)
            dist.all_reduce(tensor, group=group)
            errors.append(wrong(tensor, 2 * first + 1))
            dist.destroy_process_group(group)
    everyone = dist.new_group(list(range(me.size)))
    tensor = me.tensor(1)
    dist.all_reduce(tensor, group=everyone)
    dist.destroy_process_group(everyone)
    return first_wrong(*errors, wrong(tensor, me.size))


def _sum_of_ranks(me: Rank) -> float:
    return me.size * (me.size + 1) / 2


OPERATIONS: Mapping[str, Callable[[Rank], str]] = {
    "send/recv": send_recv,
    "isend/irecv": isend_irecv,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "scatter": scatter,
    "gather": gather,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "new_group": own_groups,
}


# ----------------------------------------------------------------------------
# The speed of messages of each size, through torch and through a plain TCP stream: rank 0 and
# another one send a message back and forth. ``torch_ms`` and ``raw_ms`` are one way: half of the
# fastest round trip.


def rounds_of(size: int) -> int:
    """The number of round trips of a size.

    >>> rounds_of(4), rounds_of(64 << 20)
    (30, 2)
    """
    return max(2, min(_MAX_ROUNDS, _BYTES_EACH // size))


def _pair(rank: int, peer: int, device: str, address: str) -> Iterator[dict[str, Any]]:
    with contextlib.closing(_stream(rank, peer, device, address)) as stream:
        for size in SIZES:
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            buffer = bytearray(size)
            raw_s = min(_raw_round(rank, stream, buffer) for _ in range(rounds_of(size)))
            torch_s = min(_torch_round(rank, peer, message) for _ in range(rounds_of(size)))
            if rank == 0:
                yield {
                    "size_bytes": size,
                    "torch_ms": 500 * torch_s,
                    "raw_ms": 500 * raw_s,
                }
            is_fast = max(torch_s, raw_s) < DOCTOR_SLOW_ROUND_TRIP_S
            if not _agree(rank, peer, device, is_fast):
                return


def _raw_round(rank: int, stream: socket.socket, buffer: bytearray) -> float:
    began = SYSTEM_CLOCK.monotonic()
    if rank == 0:
        stream.sendall(buffer)
        _receive(stream, buffer)
    else:
        _receive(stream, buffer)
        stream.sendall(buffer)
    return SYSTEM_CLOCK.monotonic() - began


def _torch_round(rank: int, peer: int, message: torch.Tensor) -> float:
    began = SYSTEM_CLOCK.monotonic()
    if rank == 0:
        dist.send(message, peer)
        dist.recv(message, peer)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
    if message.is_cuda:
        torch.cuda.synchronize()
    return SYSTEM_CLOCK.monotonic() - began


def _receive(stream: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        received = stream.recv_into(view)
        if not received:
            raise ConnectionResetError("the peer closed the plain TCP stream")
        view = view[received:]


def _stream(rank: int, peer: int, device: str, address: str) -> socket.socket:
    """A connection between the two ranks, to the address of rank 0's node."""
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.settimeout(DOCTOR_RAW_CONNECT_S)
            listener.bind((address, 0))
            listener.listen()
            _send(peer, device, int(listener.getsockname()[1]))
            stream, _ = listener.accept()
    else:
        stream = socket.create_connection((address, _recv(device)), timeout=DOCTOR_RAW_CONNECT_S)
    stream.settimeout(DOCTOR_RAW_CONNECT_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _agree(rank: int, peer: int, device: str, continues: bool) -> bool:
    """Whether both continue; rank 0 decides."""
    if rank == 0:
        _send(peer, device, int(continues))
        return continues
    return bool(_recv(device))


def _send(peer: int, device: str, number: int) -> None:
    dist.send(torch.tensor([number], device=device), peer)


def _recv(device: str) -> int:
    number = torch.tensor([0], device=device)
    dist.recv(number, 0)
    return int(number.item())


# ----------------------------------------------------------------------------
# Checks: each is called by all ranks, and returns the same findings on all of them.

Check = Callable[[Rank], list[Finding]]


def operation(name: str, of: Callable[[Rank], str], device: str) -> Check:
    """An operation, and whether its result is right on every rank."""

    def check(me: Rank) -> list[Finding]:
        me = replace(me, device=device)
        result = {"wrong": "", "unsupported": "", "took_ms": 0.0}
        began = SYSTEM_CLOCK.monotonic()
        try:
            result["wrong"] = of(me)
            if device != "cpu":
                torch.cuda.synchronize()
        except Exception as error:
            if not any(part in str(error) for part in _UNSUPPORTED):
                raise
            result["unsupported"] = one_line(error)
        result["took_ms"] = 1000 * (SYSTEM_CLOCK.monotonic() - began)
        return [verdict(name, me, everyone(result))]

    return check


def verdict(name: str, me: Rank, results: Sequence[Mapping[str, Any]]) -> Finding:
    """The finding on an operation, from the results of all ranks."""
    for rank, result in enumerate(results):
        if result["wrong"]:
            return failed(
                name,
                f"wrong result on rank {rank}{_where(me, rank)}: {result['wrong']}",
                "a link or memory corrupts data: replace the named node, and check `ethtool -S`, "
                "ECC counters and NIC offloads",
            )
    if results[0]["unsupported"]:
        return skipped(name, results[0]["unsupported"])
    slowest = max(result["took_ms"] for result in results)
    return ok(name, f"correct on {len(results)} ranks, {slowest:.1f} ms")


def _where(me: Rank, rank: int) -> str:
    ends = 0
    for node, name in zip(me.nodes, me.names, strict=True):
        ends += node["ranks"]
        if rank < ends:
            return f" (node {name})" if len(me.nodes) > 1 else ""
    return ""


def initialisation(scheme: str) -> Check:
    """A process group made as a script makes one with this ``init_method``."""
    name = f"gloo init {scheme}"

    def check(me: Rank) -> list[Finding]:
        with contextlib.ExitStack() as held:
            if scheme == "file://":
                path = _shared_path(me)
                if path is None:
                    return [skipped(name, "no shared folder (--checkpoints)")]
                held.callback(Path(path).unlink, missing_ok=True)
                return operation(name, lambda me: _group(me, f"file://{path}"), "cpu")(me)
            reserve = PortReserve(1)
            held.callback(reserve.close)
            port = everyone(reserve.ports[0])[0]
            address = me.nodes[0]["address"]
            host = f"[{address}]" if ":" in address else address
            variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
            variables |= {"RANK": str(me.rank), "WORLD_SIZE": str(me.size)}
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            held.enter_context(mock.patch.dict(os.environ, variables))
            url = "env://" if scheme == "env://" else f"tcp://{host}:{port}"
            return operation(name, lambda me: _group(me, url), "cpu")(me)

    return check


def _group(me: Rank, url: str) -> str:
    timeout = datetime.timedelta(seconds=me.given["deadline_s"])
    store = next(iter(rendezvous(url, me.rank, me.size, timeout=timeout)))[0]
    prefixed = dist.PrefixStore("doctor", store)  # type: ignore[attr-defined]
    group: Any = dist.ProcessGroupGloo(prefixed, me.rank, me.size, timeout)
    tensor = me.tensor(1)
    group.allreduce([tensor]).wait()
    return wrong(tensor, me.size)


def _shared_path(me: Rank) -> str | None:
    """A new file in the checkpoint folder, if all nodes see the one that the first rank made."""
    folder = me.given["folder"]
    name = everyone(f".elastic-doctor-{os.getpid()}-{os.urandom(4).hex()}")[0]
    path = Path(folder) / name if folder else None
    if path is not None and me.rank == 0:
        with contextlib.suppress(OSError):
            path.touch()
    everyone(None)
    if all(everyone(path is not None and path.exists())):
        return str(path)
    if path is not None and me.rank == 0:
        path.unlink(missing_ok=True)
    return None


def speed(label: str, peer: int, device: str) -> Check:
    """Messages of each size between rank 0 and one other, through torch and a plain stream."""

    def check(me: Rank) -> list[Finding]:
        rows: list[dict[str, Any]] = []
        if me.rank in (0, peer):
            rows = list(_pair(me.rank, peer, device, me.nodes[0]["address"]))
        rows = everyone(rows)[0]
        me.speeds.extend({"backend": label, "peer": peer, **row} for row in rows)
        is_one_machine = len({node["address"] for node in me.nodes}) == 1
        return [of_speed(label, peer, rows, is_one_machine=is_one_machine)]

    return check


def of_speed(
    label: str, peer: int, rows: Sequence[Mapping[str, Any]], *, is_one_machine: bool
) -> Finding:
    """The finding on one pair, with the smallest and the largest message."""
    name, small, large = f"{label} speed 0-{peer}", rows[0], rows[-1]
    size = large["size_bytes"]
    torch_rate, raw_rate = rate(size, large["torch_ms"]), rate(size, large["raw_ms"])
    measured = (
        f"{human(small['size_bytes'])}: {small['torch_ms'] * 1000:.0f} µs (raw TCP "
        f"{small['raw_ms'] * 1000:.0f} µs); {human(size)}: {torch_rate:.2f} GB/s (raw TCP "
        f"{raw_rate:.2f} GB/s)"
    )
    if not is_one_machine and torch_rate < _MIN_SHARE_OF_RAW * raw_rate:
        return warning(
            name,
            measured,
            "another interface may be in use: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    return ok(name, measured)


def rate(size: int, milliseconds: float) -> float:
    """In GB/s.

    >>> rate(1_000_000, 1.0)
    1.0
    """
    return size / milliseconds / 1e6


def memory(me: Rank) -> list[Finding]:
    """The peak memory of a rank, including torch itself."""
    peaks = everyone(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    return [ok("gloo memory", f"at most {human(max(peaks))} in a rank, torch included")]


def builds(me: Rank) -> list[Finding]:
    """Versions that are to be equal on all nodes, and whether torch sees their GPUs."""
    own = {**me.given["facts"], **_build(), "gpu_errors": _gpu_errors() if me.is_first else []}
    of_nodes = me.by_node(own)
    findings = []
    for number, name in enumerate(me.names):
        node = name if len(me.names) > 1 else ""
        findings += [replace(one, node=node) for one in gpu_findings(of_nodes[number])]
    if len(of_nodes) == 1:
        return findings
    for what in ("python", "torch", "CUDA", "NCCL", "torch-elastic-harness", "GPU driver", "MTU"):
        values = {me.names[n]: str(node[what]) for n, node in of_nodes.items()}
        remedy = "use one image and one configuration on all nodes"
        fatal = what not in ("python", "GPU driver", "MTU")
        findings.append(checks.equal_over_nodes(f"equal {what}", values, remedy, fatal=fatal))
    return findings


def _build() -> dict[str, Any]:
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version  # torch has no types for it
    return {
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, version())) if dist.is_nccl_available() else "none",
        "gpus": torch.cuda.device_count(),
        "has_driver": checks.has_gpu_driver(),
    }


def _gpu_errors() -> list[str]:
    """Errors of this node's devices, tested with a small matrix product on each."""
    findings = []
    for device in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(_GPU_SIDE, _GPU_SIDE, device=f"cuda:{device}")
            is_wrong = wrong(ones @ ones, _GPU_SIDE)
        except Exception as error:  # noqa: BLE001 (reported)
            is_wrong = one_line(error)
        if is_wrong:
            findings.append(f"GPU {device}: {is_wrong}")
    return findings


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
    return [
        warning(
            name,
            f"none, although a driver is installed: torch {build['torch']} is built for CUDA "
            f"{build['CUDA']}",
            "install a torch for this driver's CUDA, and check CUDA_VISIBLE_DEVICES",
        )
    ]


def reachability(me: Rank) -> list[Finding]:
    """TCP between every two nodes, both ways; their names, and their clocks."""
    host_names = sorted({n["host_name"] for i, n in enumerate(me.nodes) if i != me.node})
    with contextlib.ExitStack() as held:
        own: Any = None
        if me.is_first:
            ports = me.given["ports"]
            own = asdict(held.enter_context(network.listening_ports(me.given["address"], ports)))
        served = me.by_node(own)
        values: Any = None
        if me.is_first:
            lookup = Probe("names", host_names, deadline_s=me.given["deadline_s"])
            attempts = network.connect_to_all(
                [
                    (number, me.nodes[number]["address"], port)
                    for number, bound in sorted(served.items())
                    for port in bound["ports"]
                    if number != me.node
                ]
            )
            names = checks.of_names(host_names, lookup.result())
            values = {"attempts": [asdict(one) for one in attempts], "names": asdict(names)}
        answers = me.by_node(values)  # all nodes listen until then
    findings = [
        checks.unbound(me.names[n], error)
        for n, bound in served.items()
        for error in bound["errors"]
    ]
    findings += [finding(value["names"], me.names[n]) for n, value in answers.items()]
    attempts_of = {n: value["attempts"] for n, value in answers.items()}
    return [
        *findings,
        *network.clock_findings(me.names, attempts_of),
        *network.pair_findings(me.names, attempts_of),
    ]


def bandwidth(me: Rank) -> list[Finding]:
    """The paths from each node to the next one."""
    addresses = [node["address"] for node in me.nodes]
    own = read_network() if me.is_first else Network(interfaces=())
    return network.between_nodes(me.by_node, me.names, addresses, me.node, own)


def finding(values: Mapping[str, Any], node: str | None = None) -> Finding:
    """A finding that has been JSON."""
    findings = Finding(**{**values, "status": Status(values["status"])})
    return findings if node is None else replace(findings, node=node)


def one_line(error: Exception) -> str:
    """An exception in at most 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


# ----------------------------------------------------------------------------
# The script.


def all_checks(me: Rank) -> dict[str, Check]:
    """All checks of this world, by name. The same in each world with these nodes."""
    findings: dict[str, Check] = {"versions": builds}
    if len(me.nodes) > 1:
        findings |= {"TCP between nodes": reachability, network.NAME: bandwidth}
    if any(node["only_local"] for node in me.nodes):
        return findings
    findings |= {f"gloo init {s}": initialisation(s) for s in ("env://", "tcp://", "file://")}
    for label, device in {
        "gloo": "cpu",
        **({"nccl": me.device} if me.device != "cpu" else {}),
    }.items():
        findings |= {
            f"{label} {n}": operation(f"{label} {n}", of, device) for n, of in OPERATIONS.items()
        }
        findings |= {f"{label} speed 0-{p}": speed(label, p, device) for p in range(1, me.size)}
    return findings | {"memory": memory}


def join_group(given: Mapping[str, Any], device: torch.device, local_rank: int) -> Rank:
    """This rank in its world."""
    is_first = local_rank == 0
    values = everyone([is_first, given])
    nodes: list[dict[str, Any]] = []
    numbers = []
    for first, node in values:
        if first:
            nodes.append({**node, "ranks": 0})
        nodes[-1]["ranks"] += 1
        numbers.append(len(nodes) - 1)
    rank = dist.get_rank()
    return Rank(
        rank=rank,
        size=len(values),
        device=str(device) if all(node["nccl"] for node in nodes) else "cpu",
        nodes=tuple(nodes),
        node=numbers[rank],
        is_first=is_first,
    )


def examine(
    run: elastic.Run,
    given: Mapping[str, Any],
    say: Callable[[str], object],
    save: Callable[[Mapping[str, Any]], object],
) -> None:
    """All checks, one per step. ``say`` gets the name of each one, ``save`` the report so far."""
    run.state.update({"done": 0, "findings": [], "speeds": [], "broken": {}})
    entered: dict[int, int] = {}  # the checks that this process has begun, and in which world

    def checked() -> None:
        me = None
        while True:
            run.begin()
            if me is None:
                me = join_group(given, run.device, run.world.local_rank)
                known = list(all_checks(me).items())
            number = run.state["done"]
            is_complete = number == len(known)
            save({**_report(me, run.state, everyone(_reasons())), "is_complete": is_complete})
            if is_complete:
                return
            name, check = known[number]
            say(name)
            if before := max(everyone(entered.get(number, 0))):
                # It has ended that world: the reason for the next one is its result.
                run.state["broken"][name] = before
            else:
                entered[number] = run.world.generation
                me = replace(me, speeds=[])
                run.state["findings"] += [_plain(one) for one in check(me)]
                run.state["speeds"] += me.speeds
            run.state["done"] = number + 1
            run.commit()

    run.retry(checked)


def _reasons() -> list[list[Any]]:
    """The generations of the worlds that this node's agent has recorded, and why they formed."""
    records, _ = read_folder(os.environ["ELASTIC_JOURNAL"])
    formed = [record for record in records if record.name == "world-formed"]
    return [[record.whole("generation"), record.text("reason")] for record in formed]


def _report(
    me: Rank, state: Mapping[str, Any], of_ranks: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    several = len(me.nodes) > 1
    own = [
        {**one, "node": name if several else ""}
        for node, name in zip(me.nodes, me.names, strict=True)
        for one in node["findings"]
    ]
    formed = sorted({(generation, why) for reasons in of_ranks for generation, why in reasons})
    broken = [
        _plain(checks.broken(name, next((why for g, why in formed if g > before), "it ended")))
        for name, before in state["broken"].items()
    ]
    findings = [*own, *state["findings"], *broken]
    return {"nodes": me.names, "findings": findings, "speeds": list(state["speeds"])}


def _plain(findings: Finding) -> dict[str, Any]:
    return {**asdict(findings), "status": findings.status.value}


def main(argv: Sequence[str]) -> None:
    """The script: ``FOLDER`` of this node."""
    folder = Path(argv[0])
    given = json.loads((folder / "given.json").read_text())
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    given["nccl"] = dist.is_nccl_available() and torch.cuda.device_count() >= ranks
    run = elastic.join(backend=None if given["nccl"] else "gloo")

    def save(report: Mapping[str, Any]) -> None:
        if run.world.local_rank == 0:
            part = folder / "report.part"
            part.write_text(json.dumps(report))
            part.rename(folder / "report.json")

    examine(run, given, (folder / f"current-{os.environ['LOCAL_RANK']}").write_text, save)


if __name__ == "__main__":
    main(sys.argv[1:])
