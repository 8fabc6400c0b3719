"""What it takes to be let in: one connection from connect to proved, and TLS on top of it.

    python benchmarks/handshake.py [--rounds 300] [--kills 20] [--json]

Connections are those of peers' memories, on loopback: client and server share the machine, so both
ends' work is in each number. ``bare`` is the TCP connection and one round trip of as many bytes.
The kinds take turns, so that a busy moment hits all of them; the CPU time of both ends is what a
busy machine changes least. ``--kills``: nodes of jobs that train are killed at random moments,
some jobs without and some with TLS.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from measurement import Report, Row
from recovery_job import a_job

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import ClusterTimeout
from elastic.testing.reaper import reap_descendants
from elastic.wire.base import Limits
from elastic.wire.channel import Channel
from elastic.wire.handshake import MAX_FRAME, Credentials, SecretKey
from elastic.wire.hub import Handler, Hub, listen
from elastic.wire.tls import Tls, TlsFiles

KEY = SecretKey.generate()
LIMITS = Limits(frame_bytes=1024)
TIMEOUT_S = 60.0
KILLS_OF_A_JOB = 5
WARM_UP = 5
KILLS = ("kill node", "kill leader node", "kill rank 0 node")


def measure_connections(tls: Tls, rounds: int) -> list[Row]:
    """Milliseconds until the server has proved itself and an answer has come."""
    took: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    with bare_server() as bare, hub(None) as plain, hub(tls) as secured:
        kinds: dict[str, Callable[[], None]] = {
            "bare": lambda: connect_bare(bare),
            "HMAC": lambda: connect(plain, None),
            "HMAC and TLS": lambda: connect(secured, tls),
        }
        for number in range(rounds + WARM_UP):
            for kind, once in kinds.items():
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                once()
                if number >= WARM_UP:
                    took[kind].append((time.perf_counter() - began_s) * 1e3)
                    cpu[kind].append((time.process_time() - began_cpu_s) * 1e3)
    rows = [Row("connection", kind, "ms", tuple(values)) for kind, values in took.items()]
    return rows + [Row("CPU, both ends", kind, "ms", tuple(v)) for kind, v in cpu.items()]


def measure_bulk(tls: Tls, size_bytes: int, rounds: int) -> list[Row]:
    """MiB per second over one connection, one way."""
    rates: dict[str, list[float]] = defaultdict(list)
    with hub(None, detaches=True) as plain, hub(tls, detaches=True) as secured:
        for _ in range(rounds):
            for kind, port, given in (("HMAC", plain, None), ("HMAC and TLS", secured, tls)):
                channel = opened(port, given)
                into, block = 0, memoryview(bytearray(1 << 20))
                channel.expect(size_bytes)
                channel.send({"bytes": size_bytes})
                began_s = time.perf_counter()
                while into < size_bytes:
                    channel.fill(block)
                    into += len(block)
                rates[kind].append(size_bytes / (1 << 20) / (time.perf_counter() - began_s))
                channel.close()
    return [Row("bulk", kind, "MiB/s", tuple(values)) for kind, values in rates.items()]


def measure_kills(tls: Tls, kills: int, rng: random.Random, rows: list[Row]) -> None:
    """The survivors' longest pause, in jobs of three nodes, one after the other; what was measured
    until a failure counts."""
    files = tls.files
    settings = {"node_cacert": files.cacert, "node_cert": files.cert, "node_key": files.key}
    confs: dict[str, dict[str, str]] = {"HMAC": {}, "HMAC and TLS": settings}
    samples: dict[str, list[float]] = {kind: [] for kind in confs}
    failed: dict[str, int] = defaultdict(int)
    try:
        with EmbeddedEtcd() as etcd:
            for first in range(0, kills, KILLS_OF_A_JOB):
                for kind, conf in confs.items():
                    with a_job(etcd, 0, rng, conf=conf) as job:
                        try:
                            for number in range(first, min(kills, first + KILLS_OF_A_JOB)):
                                case = KILLS[number % len(KILLS)]
                                job.hurt(case)
                                samples[kind].append(job.samples[case][-1])
                                took_s = samples[kind][-1]
                                say(f"{number + 1} of {kills}: {case}, {kind}: {took_s:.3f} s")
                        except ClusterTimeout as error:  # of a join, or a recovery
                            say(f"gave this job up: {str(error).splitlines()[0]}")
                        failed[kind] += sum(job.failed[case] for case in KILLS)
    finally:
        for kind, values in samples.items():
            rows.append(Row("recovery from a killed node", kind, "s", tuple(values), failed[kind]))


# -- servers and clients ------------------------------------------------------------------------


class Answering(Handler):
    """Answers each message with itself; or gives the connection to a thread that sends bytes."""

    def __init__(self, detaches: bool) -> None:
        self.hub: Hub | None = None
        self._detaches = detaches

    def opened(self, connection: object) -> None:
        assert self.hub is not None
        if self._detaches:
            sock, received = self.hub.detach(connection)  # type: ignore[arg-type]
            channel = Channel(sock, timeout_s=TIMEOUT_S, received=received)
            threading.Thread(target=send_bulk, args=(channel,), name="bulk", daemon=True).start()

    def received(self, connection: object, payload: bytes) -> None:
        assert self.hub is not None
        self.hub.send(connection, payload)  # type: ignore[arg-type]


def send_bulk(channel: Channel) -> None:
    request = channel.receive(1024)
    assert request is not None
    channel.expect(request["bytes"])
    block = memoryview(bytearray(1 << 20))
    for _ in range(request["bytes"] >> 20):
        channel.send_bytes(block)
    channel.receive_frame(1)
    channel.close()


@contextlib.contextmanager
def hub(tls: Tls | None, *, detaches: bool = False) -> Iterator[int]:
    listener = listen("127.0.0.1", backlog=64)
    port, handler = int(listener.getsockname()[1]), Answering(detaches)
    made = Hub(
        *("benchmark", listener, handler),
        credentials=Credentials(key=lambda: KEY, identity="server", tls=tls),
        limits=LIMITS,
        report=say,
    )
    handler.hub = made
    made.start()
    try:
        yield port
    finally:
        made.close()


def opened(port: int, tls: Tls | None) -> Channel:
    sock = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    channel = Channel(sock, timeout_s=TIMEOUT_S, tls=tls)
    channel.authenticate(KEY, "client", expected="server")
    return channel


def connect(port: int, tls: Tls | None) -> None:
    channel = opened(port, tls)
    channel.send_frame(bytes(32))
    assert channel.receive_frame(MAX_FRAME) == bytes(32)
    channel.close()


@contextlib.contextmanager
def bare_server() -> Iterator[int]:
    """An echo server, one connection at a time."""

    def run() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                if (said := connection.recv(64)) == b"end":
                    return
                connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        thread = threading.Thread(target=run, name="bare")
        thread.start()
        try:
            yield port
        finally:
            with socket.create_connection(("127.0.0.1", port)) as last:
                last.sendall(b"end")
            thread.join()


def connect_bare(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(bytes(32))
        assert len(sock.recv(32)) == 32


def issue(folder: Path) -> TlsFiles:
    """An authority and a certificate, as docs/security.md makes them."""
    (folder / "uses").write_text("extendedKeyUsage=serverAuth,clientAuth\n")
    for command in (
        "ecparam -genkey -name prime256v1 -out ca.key",
        "req -x509 -new -key ca.key -days 2 -subj /CN=job-ca -out ca.pem",
        "ecparam -genkey -name prime256v1 -out node.key",
        "req -new -key node.key -subj /CN=node -out node.csr",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile uses "
        "-out node.pem",
    ):
        subprocess.run(
            ["openssl", *command.split()], cwd=folder, check=True, stderr=subprocess.DEVNULL
        )
    return TlsFiles(*(str(folder / name) for name in ("ca.pem", "node.pem", "node.key")))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as one object")
    parser.add_argument("--rounds", type=int, default=300, help="connections of each kind")
    parser.add_argument("--bulk-mib", type=int, default=256, help="sent at once; 0: none")
    parser.add_argument("--kills", type=int, default=0, help="of nodes, with and without TLS")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        tls = Tls(issue(Path(folder)))
        try:
            if options.rounds:
                rows += measure_connections(tls, options.rounds)
            if options.bulk_mib:
                rows += measure_bulk(tls, options.bulk_mib << 20, 5)
            if options.kills:
                measure_kills(tls, options.kills, random.Random(options.seed), rows)
        finally:
            Report("handshake", options.seed, tuple(rows)).show(as_json=options.json)


if __name__ == "__main__":
    main()
