"""torchft from PyPI on the same model and machine: what the death of a replica costs there.

torchft gets a separate virtual environment, kept between runs in the user's cache folder. It sees
the packages of this one behind its own, so that both run on the same torch, and gigabytes of it are
not installed twice. Each of three replicas is a torchrun with one worker, as torchft's own example
starts them; the lighthouse is a separate process that is never killed. A replica dies with all its
processes.

Two settings: ``torchft default`` is what the package comes with, ``torchft tight`` the shortest
times with which three replicas train here without losing each other.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic.testing.node import LocalNode
from elastic.testing.processes import TOKEN, kill_at_once

SCRIPT = Path(__file__).parent / "scripts" / "mlp_torchft.py"
PACKAGES = ("torchft-nightly", "numpy")
SETTLE_S = 0.7


class Unavailable(Exception):
    """torchft cannot run on this machine; the text has the reason."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides how soon torchft sees a death."""

    name: str
    heartbeat_timeout_ms: int  # of the lighthouse, as the next two
    join_timeout_ms: int
    tick_ms: int
    timeout_s: float  # of a collective and of most calls
    heartbeat_ms: int


DEFAULT = Settings("torchft default", 5000, 60_000, 100, 60.0, 100)
TIGHT = Settings("torchft tight", 200, 200, 10, 1.0, 20)


@dataclass(frozen=True)
class Event:
    """What one death, and the joining node after it, cost; None: no recovery."""

    kill_s: float | None
    join_s: float | None


@dataclass(frozen=True)
class Line:
    """A committed step of a replica."""

    time_s: float
    step: int
    replicas: int


def prepare(say: Callable[[str], None]) -> tuple[Path, str]:
    """The environment's python and torchft's version. Raises Unavailable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "torch-elastic-harness" / f"torchft-{sys.version_info.minor}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        say(f"installing torchft in {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(folder)])
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _call([str(python), "-m", "pip", "install", "--quiet", *PACKAGES])
        (folder / "complete").touch()
    ask = "import torchft, importlib.metadata as m; print(m.version('torchft-nightly'))"
    return python, _call([str(python), "-c", ask]).strip()


def _call(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Unavailable(f"{' '.join(command[:4])} ...: {' '.join(last)}")
    return done.stdout


class Replicas:
    """A lighthouse and its replicas, in a folder."""

    def __init__(self, python: Path, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.running: list[LocalNode] = []
        self._python = python
        self._token = uuid.uuid4().hex
        self._started = 0
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            self._port = held.getsockname()[1]
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_")},
            "OMP_NUM_THREADS": "1",
            # This project's hook, which importing torch installs (docs/decisions/0028).
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
        }
        self._lighthouse = self._start_lighthouse()

    def _start_lighthouse(self) -> subprocess.Popen[bytes]:
        with (self.folder / "lighthouse.log").open("ab") as log:
            return subprocess.Popen(
                [
                    str(self._python.parent / "torchft_lighthouse"),
                    f"--bind=127.0.0.1:{self._port}",
                    "--min_replicas=1",
                    f"--heartbeat_timeout_ms={self.settings.heartbeat_timeout_ms}",
                    f"--join_timeout_ms={self.settings.join_timeout_ms}",
                    f"--quorum_tick_ms={self.settings.tick_ms}",
                ],
                env={**self._environment, TOKEN: f"{self._token}/lighthouse"},
                stdout=log,
                stderr=log,
            )

    def start(self, *arguments: str) -> LocalNode:
        """One more replica."""
        number, self._started = self._started, self._started + 1
        command = [
            *(str(self._python), "-m", "torch.distributed.run", "--nnodes=1"),
            *("--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
            *("--local-addr=127.0.0.1", str(SCRIPT), f"--replica={number}"),
            f"--timeout-s={self.settings.timeout_s}",
            f"--heartbeat-ms={self.settings.heartbeat_ms}",
            *arguments,
        ]
        node = LocalNode(
            f"replica{number}",
            command,
            self._environment,
            f"{self._token}/{number}",
            self.folder / f"replica{number}.log",
            folder=self.folder,
        )
        self.running.append(node)
        return node

    def start_recording(self) -> LocalNode:
        return self.start(f"--record={self.folder / f'{self._started}.steps'}")

    def lines(self, node: LocalNode) -> list[Line]:
        """The committed steps of a replica."""
        path = self.folder / f"{node.name.removeprefix('replica')}.steps"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [Line(float(a), int(b), int(c)) for a, b, c in map(str.split, whole)]

    def all_stepped(self, since_s: float, replicas: int) -> bool:
        """Every running replica has completed a step since then, together with so many."""
        return all(
            any(x.time_s > since_s and x.replicas == replicas for x in self.lines(node)[-200:])
            for node in self.running
        )

    def pause(self, nodes: list[LocalNode], since_s: float) -> float:
        """The longest gap between two committed steps of one of them that ends since then."""
        gaps = [
            b.time_s - a.time_s
            for node in nodes
            for a, b in itertools.pairwise(self.lines(node))
            if b.time_s > since_s
        ]
        return max(gaps)

    def stop(self) -> None:
        kill_at_once(self._token)
        self._lighthouse.wait()
        for node in self.running:
            node.wait(10.0)


@contextmanager
def replicas(python: Path, settings: Settings) -> Iterator[Replicas]:
    folder = Path(tempfile.mkdtemp(prefix="torchft-"))
    try:
        job = Replicas(python, settings, folder)
        try:
            yield job
        finally:
            job.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_kills(
    python: Path,
    settings: Settings,
    kills: int,
    rng: random.Random,
    say: Callable[[str], None],
    cap_s: float = 90.0,
) -> list[Event]:
    """Deaths of complete replicas at random times, in one job while it lives."""
    events: list[Event] = []
    while len(events) < kills:
        with replicas(python, settings) as job:
            began_s = time.time()
            for _ in range(3):
                job.start_recording()
            if not _wait(lambda job=job, t=began_s: job.all_stepped(t, 3), 120.0):  # type: ignore[misc]
                raise Unavailable("three replicas did not train within 120 s")
            while len(events) < kills:
                events.append(_kill_one(job, rng, cap_s))
                say(f"{settings.name} {len(events)} of {kills}: {events[-1]}")
                if events[-1].kill_s is None or events[-1].join_s is None:
                    break  # a job that did not recover provides no data about the next death
    return events


def measure_stops(
    python: Path,
    settings: Settings,
    stops: int,
    rng: random.Random,
    say: Callable[[str], None],
    cap_s: float = 150.0,
) -> tuple[list[float], int]:
    """A worker is stopped (SIGSTOP) at a random moment, and killed once the others train without
    it: their pauses, and how often they did not go on. A new job for each: torchft ends no worker
    that is merely silent, and a replica that comes back is another measurement."""
    pauses_s: list[float] = []
    failed = 0
    for _ in range(stops):
        with replicas(python, settings) as job:
            began_s = time.time()
            for _ in range(3):
                job.start_recording()
            if not _wait(lambda job=job, t=began_s: job.all_stepped(t, 3), 120.0):  # type: ignore[misc]
                raise Unavailable("three replicas did not train within 120 s")
            pause_s = _stop_one(job, rng, cap_s)
            if pause_s is None:
                failed += 1
            else:
                pauses_s.append(pause_s)
            say(f"{settings.name}: stopped worker: {pause_s}")
    return pauses_s, failed


def _stop_one(job: Replicas, rng: random.Random, cap_s: float) -> float | None:
    time.sleep(SETTLE_S + rng.random() * 0.2)
    victim = rng.choice(job.running)
    job.running.remove(victim)
    survivors = list(job.running)
    stopped_s = time.time()
    os.kill(victim.workers()[0].pid, signal.SIGSTOP)
    try:
        if not _wait(lambda: job.all_stepped(stopped_s, 2), cap_s):
            return None
        time.sleep(SETTLE_S)
        return job.pause(survivors, stopped_s)
    finally:
        victim.kill()


def _kill_one(job: Replicas, rng: random.Random, cap_s: float) -> Event:
    time.sleep(SETTLE_S + rng.random() * 0.2)
    victim = rng.choice(job.running)
    job.running.remove(victim)
    survivors = list(job.running)
    killed_s = time.time()
    victim.kill()
    if not _wait(lambda: job.all_stepped(killed_s, 2), cap_s):
        return Event(None, None)
    time.sleep(SETTLE_S)
    kill_s = job.pause(survivors, killed_s)
    began_s = time.time()
    job.start_recording()
    if not _wait(lambda: job.all_stepped(began_s, 3), cap_s):
        return Event(kill_s, None)
    time.sleep(SETTLE_S)
    return Event(kill_s, job.pause(survivors, began_s))


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def timed_run(python: Path, settings: Settings, steps: int) -> dict[str, float]:
    """Three replicas without a death; what the first of them to end printed."""
    with replicas(python, settings) as job:
        nodes = [job.start(f"--steps={steps}") for _ in range(3)]

        def reports() -> list[str]:
            texts = (node.log_text().splitlines() for node in nodes)
            return [x for text in texts for x in text if x.startswith('{"wall_s"')]

        if not _wait(lambda: bool(reports()), 60.0 + steps * 0.2):
            raise Unavailable(f"no steady run ended\n{nodes[0].log_tail()}")
        result: dict[str, float] = json.loads(reports()[0])
        return result
