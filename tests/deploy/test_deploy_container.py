"""The image's entrypoint in a container without Docker: uid 10001, read-only root, no capabilities.

The pod is the dev overlay's: its environment, its arguments, its volumes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from container import REPOSITORY, UID, Container, why_not
from dockerfile import Dockerfile
from manifests import DEPLOY, Rendered
from test_deploy_settings import environment

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import eventually

REFUSED = why_not()
pytestmark = [
    pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED)),
]
PREEMPTED = 75
TERMINATED = 128 + 15  # before Python installs its handler


class Start:
    """Starts the worker of the dev overlay; ``environ`` is what the kubelet would give it."""

    def __init__(self, dev: Rendered, etcd: EmbeddedEtcd, folder: Path, health_port: int) -> None:
        self._pod = dev.workers
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        os.chown(self.checkpoints, UID, UID)  # as fsGroup does
        self.environ = {
            **Dockerfile(DEPLOY / "Dockerfile").environment("example"),
            **environment(self._pod, dev.settings),
            # Use this machine instead of a cluster.
            "PET_RDZV_ENDPOINT": etcd.endpoint,
            "PET_RDZV_ID": folder.name,
            "PET_LOCAL_ADDR": "127.0.0.1",
            "ELASTIC_HEALTH_PORT": str(health_port),
        }

    def __call__(self) -> Container:
        entrypoint = Dockerfile(DEPLOY / "Dockerfile").entrypoint("example")
        (container,) = self._pod.spec["containers"]
        command = [
            word.replace("/opt/venv/bin", f"{sys.prefix}/bin")
            for word in (*entrypoint, *container["args"])
        ]
        script = REPOSITORY / "examples" / "digits.py"
        return Container(
            command,
            self.environ,
            self.folder / "container",
            mounts={"/checkpoints": self.checkpoints},
            setup=f"mkdir -p $root/opt/elastic; cp {script} $root/opt/elastic/train.py",
        )

    def probe(self, path: str) -> int:
        """The status that a kubelet would see; 0: no answer."""
        url = f"http://127.0.0.1:{self.environ['ELASTIC_HEALTH_PORT']}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


@pytest.fixture
def health_port() -> Iterator[int]:
    """Bound but not listening: a server that reuses addresses can bind it, and no connection gets
    it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@pytest.fixture
def start(
    render: Callable[[str], Rendered], shared_etcd: EmbeddedEtcd, tmp_path: Path, health_port: int
) -> Start:
    return Start(render("dev"), shared_etcd, tmp_path, health_port)


def assert_unprivileged(container: Container) -> None:
    assert container.status("Uid").split() == [str(UID)] * 4
    assert container.status("NoNewPrivs") == "1"
    assert int(container.status("CapEff"), 16) == 0


@pytest.mark.slow
def test_the_container_trains_and_forwards_sigterm(start: Start) -> None:
    with start() as container:

        def training() -> bool:
            assert not container.ended, container.output
            return start.probe("/readyz") == 200 and any(start.checkpoints.rglob("manifest.json"))

        eventually(training, "ready, with a checkpoint", within_s=200)
        assert start.probe("/livez") == 200
        assert_unprivileged(container)
        container.terminate()
        assert container.wait(timeout_s=90) == PREEMPTED, container.output
    assert "Read-only file system" not in container.output


def test_sigterm_ends_an_unprivileged_pod_that_has_just_started(start: Start) -> None:
    """If Python were PID 1, it would have no handler yet, and the kernel would drop the signal."""
    with start() as container:
        # PID 1 loses signals until dumb-init has installed its handlers, and so does its child
        # until exec: no-op handlers inherited from the parent catch them.
        eventually(lambda: catches_sigterm(container), "dumb-init is PID 1")
        eventually(lambda: has_started_its_child(container), "its child runs")
        assert_unprivileged(container)
        container.terminate()
        assert container.wait(timeout_s=90) in (PREEMPTED, TERMINATED), container.output


def has_started_its_child(container: Container) -> bool:
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    names = [Path(f"/proc/{child}/comm").read_text().strip() for child in children]
    return any(name != "dumb-init" for name in names)


def catches_sigterm(container: Container) -> bool:
    caught = int(container.status("SigCgt"), 16)
    return container.status("Name") == "dumb-init" and bool(caught >> (signal.SIGTERM - 1) & 1)
