"""What watching a job costs: `elastic status`, and a dashboard with 0 and with 200 pages open.

The job is its records in a real etcd: 16 nodes in one world, and progress every two seconds.
Sections of benchmarks/telemetry.py.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
from measurement import Row

from elastic.membership.progress import JobProgress, encode_progress
from elastic.membership.records import Keys, Node, NodeState, ProcessIdentity, WorldRecord, encode
from elastic.store.client import EtcdConfig, parse_endpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.wire.messages import Cause, WorldState

RUN_ID = "watched"
NODES, PAGES = 16, 200
MEASURED_S, PROGRESS_S = 20.0, 2.0


@contextmanager
def job() -> Iterator[tuple[str, EtcdStore]]:
    """etcd with the job's records; its endpoint."""
    with EmbeddedEtcd(name="watched") as etcd:
        store = EtcdStore(EtcdConfig(endpoints=parse_endpoints(etcd.endpoint)))
        keys = Keys.of("/elastic", RUN_ID)
        nodes = [_node(number) for number in range(NODES)]
        world = WorldRecord(
            generation=1,
            nonce="n",
            lineage=(),
            state=WorldState.ACTIVE,
            cause=Cause.FIRST,
            reason="all nodes arrived",
            members=tuple(node.as_member() for node in nodes),
            mode="in-process",
            store_host="10.0.0.0",
            store_port=5001,
            switch_at_step=None,
            min_nodes=1,
            max_nodes=NODES,
            time_s=time.time(),
        )
        store.put(keys.world, encode(world))
        for node in nodes:
            store.put(keys.node(node.node_id), encode(node))
        try:
            yield etcd.endpoint, store
        finally:
            store.close()


def _node(number: int) -> Node:
    name = f"node-{number}"
    process = ProcessIdentity(
        host=name, machine_id="", boot_id="", pod_uid="", pid_namespace=1, pid=1, start_ticks=1
    )
    return Node(
        node_id=f"id-{number}",
        name=name,
        nproc=8,
        role="default",
        address=f"10.0.0.{number}",
        ports=(5001,),
        liveness_port=6000,
        process=process,
        state=NodeState.READY,
        in_process=True,
        min_nodes=1,
        max_nodes=NODES,
        library="",
        torch="",
        running=None,
        arrived_for=0,
        failure=None,
        failure_exit_code=None,
        joined_at_s=time.time(),
    )


def status_rows(args: argparse.Namespace) -> list[Row]:
    """`elastic status` as a process of its own, and `elastic --help`."""
    with job() as (endpoint, _):
        status = ["status", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={RUN_ID}"]
        return [
            Row("wall time", f"elastic {name}", "s", tuple(_run_s(argv) for _ in range(args.times)))
            for name, argv in (("status", status), ("--help", ["--help"]))
        ]


def _run_s(argv: list[str]) -> float:
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "elastic.cli.main", *argv], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began_s


def dashboard_rows(args: argparse.Namespace) -> list[Row]:
    """CPU of the server while steps are made, and what it sends."""
    with job() as (endpoint, store):
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "elastic.cli.main", "dashboard", "--port=0"),
                *(f"--rdzv-endpoint={endpoint}", f"--rdzv-id={RUN_ID}"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().split()[2].rstrip("/").rpartition(":")[2])
            rows = [
                Row("CPU of the server", f"{n} pages", "s/s", (_cpu(process, store, port, n),))
                for n in (0, PAGES)
            ]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
                rows.append(
                    Row("size of the page", "without journals", "kB", (len(answer.read()) / 1000,))
                )
            return rows
        finally:
            process.terminate()
            process.wait()


def _cpu(process: subprocess.Popen[str], store: EtcdStore, port: int, pages: int) -> float:
    return asyncio.run(_measure(psutil.Process(process.pid), store, port, pages))


async def _measure(process: psutil.Process, store: EtcdStore, port: int, pages: int) -> float:
    readers = [asyncio.create_task(_refresh(port)) for _ in range(pages)]
    samples = []
    await asyncio.sleep(PROGRESS_S)
    until_s, step = time.monotonic() + MEASURED_S, 0
    while time.monotonic() < until_s:
        step += 1
        progress = JobProgress(
            node_id="id-0",
            generation=1,
            step=step,
            step_time_s=PROGRESS_S,
            checkpoint_step=None,
            time_s=time.time(),
        )
        store.put(f"/elastic/{RUN_ID}/progress", encode_progress(progress))
        before, began_s = process.cpu_times(), time.monotonic()
        await asyncio.sleep(PROGRESS_S)
        after = process.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        samples.append(used_s / (time.monotonic() - began_s))
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return statistics.mean(samples)


async def _refresh(port: int) -> None:
    """As the page does."""
    async with httpx.AsyncClient() as client:
        etag = ""
        while True:
            headers = {"If-None-Match": etag}
            answer = await client.get(f"http://127.0.0.1:{port}/", headers=headers)
            etag = answer.headers["ETag"]
            await asyncio.sleep(1.0)
