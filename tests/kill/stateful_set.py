"""A StatefulSet and a kubelet emulated on one machine: pods are sessions of processes.

The command line, the environment and the grace period are those of ``deploy/base`` as kustomize
renders it. Only what a cluster would resolve is replaced: host names, folders, images. The emulated
behaviour of Kubernetes:

- pods are named by ordinals, started and ended all at once (``podManagementPolicy: Parallel``);
- whatever exits is started again, whatever its exit code (a StatefulSet's only restart policy);
- deleting is SIGTERM, and SIGKILL to everything after the grace period; the end of a pod's first
  process is the end of all of them;
- a deleted pod comes back with the same name if its ordinal is below the replicas.

There is only one template here. tests/deploy models the controller's revisions
(statefulset_controller.py).
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import yaml
from training_job import TrainingJob

from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode
from elastic.testing.processes import kill_at_once
from elastic.testing.waiting import PATIENCE_S

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = "workers"
_POLL_S = 0.05
T = TypeVar("T")


@functools.cache
def manifest() -> dict[str, dict[str, Any]]:
    """``deploy/base``, rendered: the StatefulSet, and the data of its ConfigMap."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [str(kubectl), "kustomize", str(DEPLOY / "base")],
        capture_output=True,
        text=True,
        check=True,
    )
    objects = list(yaml.safe_load_all(done.stdout))
    (workers,) = [o for o in objects if o["kind"] == "StatefulSet"]
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    settings = container["envFrom"][0]["configMapRef"]["name"]
    (config,) = [
        o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == settings
    ]
    return {"pod": workers["spec"]["template"]["spec"], "settings": config["data"]}


@dataclass
class Pod:
    """A pod, across all restarts of its container."""

    name: str
    node: LocalNode  # the container's current incarnation
    deleted_s: float | None = None  # SIGTERM was sent
    grace_s: float = 0.0


@dataclass(frozen=True)
class Ended:
    """How an incarnation of a container ended."""

    name: str
    exit_code: int
    was_deleted: bool
    took_s: float  # since it was deleted
    left: tuple[str, ...]  # processes that outlived the agent, and were killed with the pod


@dataclass(frozen=True)
class Probe:
    """A probe's answer."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)


class StatefulSet(TrainingJob):
    """``with StatefulSet(...) as workers: workers.scale(3)``."""

    def __init__(self, *arguments: Any, settings: Mapping[str, str], **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._settings = dict(settings)  # over the ConfigMap's: what an overlay would set
        self._pods: dict[str, Pod] = {}
        self._replicas = 0
        self._ended: list[Ended] = []
        self._lock = threading.RLock()
        self._closing = False
        self._error: BaseException | None = None
        self._controller = threading.Thread(target=self._run, name="statefulset-controller")

    def __enter__(self) -> StatefulSet:
        self._controller.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        self._controller.join()
        super().__exit__(kind, error, traceback)
        if self._error is not None and error is None:
            raise self._error

    # Actions of a user -------------------------------------------------------------------------

    def scale(self, replicas: int) -> None:
        """``kubectl scale``."""
        self._replicas = replicas

    def delete(self, name: str, *, grace_s: float | None = None) -> None:
        """``kubectl delete pod``, or an eviction, as by a drain."""
        with self._lock:
            self._terminate(self._pods[name], self.grace_s if grace_s is None else grace_s)

    @property
    def grace_s(self) -> float:
        """The grace period of the template, unless the settings override it."""
        of_template = manifest()["pod"]["terminationGracePeriodSeconds"]
        return float(self._settings.get("ELASTIC_TERMINATION_GRACE_S", of_template))

    def pod(self, name: str) -> LocalNode:
        """The current incarnation."""
        return self._pods[name].node

    @property
    def pods(self) -> tuple[str, ...]:
        """Names of the existing pods, including terminating ones."""
        with self._lock:
            return tuple(sorted(self._pods))

    @property
    def ended(self) -> list[Ended]:
        """Every container exit so far, in order."""
        with self._lock:
            return list(self._ended)

    def wait_ended_pods(self, count: int, timeout_s: float = PATIENCE_S) -> list[Ended]:
        """Wait until that many containers have ended; returns all."""
        return self.wait_for(
            lambda: ended if len(ended := self.ended) >= count else None,
            timeout_s,
            f"{count} ended containers",
        )

    def wait_pods(self, *names: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until exactly these pods exist."""
        self.wait_for(lambda: self.pods == names, timeout_s, f"exactly the pods {names}")

    def wait_ready(self, *names: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until all of them report ready: ``kubectl wait``."""
        self.wait_for(
            lambda: all(self.probe(name, "/readyz").status == 200 for name in names),
            timeout_s,
            f"{names} ready",
        )

    def wait_for(self, condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """The first true value of ``condition``. (A set without pods is not finished.)"""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert self._error is None, self._error
            assert time.monotonic() < deadline, (
                f"{what}: waited {timeout_s:g} s; pods {self.pods}, ended {self.ended}\n"
                f"{self.report()}"
            )
            time.sleep(_POLL_S)
        return value

    def probe(self, name: str, path: str) -> Probe:
        """The probe's answer as seen by the kubelet; status 0 if there is none."""
        pod = self._pods.get(name)
        port = self._health_port(pod.node) if pod is not None else None
        if port is None:
            return Probe(0)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return Probe(answer.status, json.loads(answer.read()))
        except OSError:
            return Probe(0)
        finally:
            connection.close()

    def _health_port(self, node: LocalNode) -> int | None:
        """Pods in one network cannot share a port: the agent reports its own."""
        return next((int(e["port"]) for e in self.events(node, "health-served")), None)

    def events(self, node: LocalNode, event: str) -> list[dict[str, Any]]:
        """The events of this name in that agent's journal."""
        file = self.folder / "journal" / f"{node.name}-{node.pid}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [e for e in found if e["event"] == event]

    # The controller and the kubelet ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._lock:
                    self._reconcile()
                time.sleep(_POLL_S)
        except BaseException as error:  # noqa: BLE001 (shown to the test)
            self._error = error

    def _reconcile(self) -> None:
        wanted = [f"{NAME}-{ordinal}" for ordinal in range(self._replicas)]
        for pod in list(self._pods.values()):
            self._look_after(pod)
            if pod.name in self._pods and pod.name not in wanted and pod.deleted_s is None:
                self._terminate(pod, self.grace_s)
        for name in wanted:
            if name not in self._pods:
                self._pods[name] = Pod(name, self._start(name))

    def _look_after(self, pod: Pod) -> None:
        now, code = time.monotonic(), pod.node.exit_code
        if code is None:
            if pod.deleted_s is not None and now - pod.deleted_s > pod.grace_s:
                pod.node.kill()
            return
        took_s = now - pod.deleted_s if pod.deleted_s is not None else 0.0
        left = tuple(str(p) for p in pod.node.processes())
        kill_at_once(pod.node.token)
        self._ended.append(Ended(pod.name, code, pod.deleted_s is not None, took_s, left))
        if pod.deleted_s is not None:
            del self._pods[pod.name]
        else:
            pod.node = self._start(pod.name)

    def _terminate(self, pod: Pod, grace_s: float) -> None:
        if pod.deleted_s is None:
            pod.deleted_s, pod.grace_s = time.monotonic(), grace_s
            pod.node.terminate()

    def _start(self, name: str) -> LocalNode:
        (container,) = manifest()["pod"]["containers"]
        command, script = container["args"][:-1], container["args"][-1]
        assert (command, Path(script).suffix) == (["run"], ".py")
        node = LocalNode(
            name,
            [sys.executable, "-m", "elastic.cli.main", *command, str(self.script), *self.args],
            {**os.environ, "OMP_NUM_THREADS": "1", **self._pod_environment(name, container)},
            f"{self._token}/{len(self.nodes)}",
            self.folder / "logs" / f"{len(self.nodes)}-{name}.log",
            folder=self.folder,
            fork_server=shared_fork_server(),
        )
        self.nodes.append(node)
        return node

    def _pod_environment(self, name: str, container: dict[str, Any]) -> dict[str, str]:
        values = {
            **manifest()["settings"],
            # Values that a cluster would resolve.
            "PET_RDZV_ENDPOINT": ",".join(self.endpoints),
            "PET_RDZV_ID": self.run_id,
            "ELASTIC_CHECKPOINTS": str(self.folder / "checkpoints"),
            "ELASTIC_HEALTH_PORT": "0",
            # Values for the tests to inspect.
            "ELASTIC_LEDGER": str(self.folder / "ledger"),
            "ELASTIC_JOURNAL": str(self.folder / "journal"),
            **self._settings,
        }
        fields = {
            "metadata.name": name,
            "metadata.uid": str(uuid.uuid4()),
            "status.podIP": "127.0.0.1",
        }
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                values[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "resourceFieldRef" in source:
                values[variable["name"]] = str(64 << 30)
            else:
                values[variable["name"]] = _expand(variable["value"], values)
        return values


def _expand(text: str, values: Mapping[str, str]) -> str:
    """``$(NAME)``, as the kubelet does."""
    for name, value in values.items():
        text = text.replace(f"$({name})", value)
    return text
