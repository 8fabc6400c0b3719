"""The kustomization that sets sizes, image, script and store of a job. Pure: text from a record.

Written in YAML whose scalars are JSON strings: no YAML library is needed to write it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from elastic.tuning.timeouts import for_pod

IMAGE = "torch-elastic-harness"
MARK = "# Written by `elastic kube render`; write it again instead of editing it."


@dataclass(frozen=True)
class Workload:
    """What an overlay makes of the workers."""

    kind: str
    name: str
    template: str  # where the pod template stands, as a JSON pointer
    namespace: str
    gpus: bool = True
    components: tuple[str, ...] = ("spot", "rdma", "kueue", "volcano")


_JOBSET = "/spec/replicatedJobs/0/template/spec/template"
WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "dev": Workload("StatefulSet", "workers", "/spec/template", "elastic-dev", gpus=False),
        "prod": Workload("StatefulSet", "workers", "/spec/template", "elastic-training"),
        "job": Workload("Job", "workers", "/spec/template", "elastic-job"),
        "jobset": Workload("JobSet", "workers", _JOBSET, "elastic-jobset", components=("kueue",)),
        "trainer": Workload(
            "TrainingRuntime",
            "elastic",
            f"/spec/template{_JOBSET}",
            "elastic-trainer",
            components=("kueue",),
        ),
    }
)


@dataclass(frozen=True)
class Store:
    """Where checkpoints go: a storage class, a claim that exists, or an object store's URL."""

    storage_class: str | None = None
    claim: str | None = None
    url: str | None = None


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """What the user wants. ``None`` leaves what the overlay says."""

    overlay: str
    deploy: str  # the path of deploy/ from where the kustomization will stand
    namespace: str
    components: tuple[str, ...] = ()
    image: str | None = None
    nodes: tuple[int, int] | None = None
    processes: int | None = None  # of a node: one per GPU
    run_id: str | None = None
    grace_s: int | None = None
    store: Store | None = None
    script: tuple[str, ...] = ()

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.overlay]


@dataclass(frozen=True)
class _Patch:
    kind: str
    name: str
    operations: tuple[Mapping[str, object], ...] = ()

    def lines(self) -> Iterator[str]:
        yield f"  - target: {{kind: {self.kind}, name: {self.name}}}"
        yield "    patch: |-"
        for operation in self.operations:
            yield f"      - {json.dumps(operation)}"


def kustomization(wanted: Overlay) -> str:
    """The whole file."""
    components = (*wanted.components, "derived")
    lines = [
        MARK,
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        f"namespace: {json.dumps(wanted.namespace)}",
        "resources:",
        f"  - {json.dumps(f'{wanted.deploy}/overlays/{wanted.overlay}')}",
        "components:",
        *(f"  - {json.dumps(f'{wanted.deploy}/components/{name}')}" for name in components),
        *_images(wanted.image),
        *_settings(wanted),
        *_patches(wanted),
    ]
    return "\n".join(lines) + "\n"


def _images(image: str | None) -> Iterator[str]:
    if image is None:
        return
    name, at, digest = image.partition("@")
    key, value = "digest", digest
    if not at:
        name, _, value = image.rpartition(":")
        key = "newTag"
    yield "images:"
    yield f"  - name: {IMAGE}"
    yield f"    newName: {json.dumps(name)}"
    yield f"    {key}: {json.dumps(value)}"


def _settings(wanted: Overlay) -> Iterator[str]:
    settings = dict(_literals(wanted))
    if not settings:
        return
    yield "configMapGenerator:"
    yield "  - name: settings"
    yield "    behavior: merge"
    yield "    literals:"
    for name, value in settings.items():
        yield f"      - {json.dumps(f'{name}={value}')}"


def _literals(wanted: Overlay) -> Iterator[tuple[str, object]]:
    if wanted.nodes is not None:
        yield "PET_NNODES", "{}:{}".format(*wanted.nodes)
    if wanted.processes is not None:
        yield "PET_NPROC_PER_NODE", wanted.processes
    if wanted.grace_s is not None:
        yield "ELASTIC_TERMINATION_GRACE_S", wanted.grace_s
        yield "PET_SHUTDOWN_TIMEOUT", int(for_pod(wanted.grace_s).shutdown_timeout_s)
    if wanted.run_id is not None:
        yield "PET_RDZV_ID", wanted.run_id
    url = wanted.store.url if wanted.store else None
    if wanted.run_id is not None or url is not None:
        root = (url or "/checkpoints").rstrip("/")
        yield "ELASTIC_CHECKPOINTS", f"{root}/{wanted.run_id or 'job-1'}"


def _patches(wanted: Overlay) -> Iterator[str]:
    patches = [*_script_patch(wanted), *_store_patches(wanted)]
    if patches:
        yield "patches:"
        for patch in patches:
            yield from patch.lines()


def _script_patch(wanted: Overlay) -> Iterator[_Patch]:
    if wanted.script:
        path = f"{wanted.workload.template}/spec/containers/0/args"
        # The kubelet replaces $(NAME); the script is meant to see it.
        words = [word.replace("$(", "$$(") for word in wanted.script]
        yield _of_workload(wanted, [_replace(path, ["run", *words])])


def _store_patches(wanted: Overlay) -> Iterator[_Patch]:
    """The third volume and mount are the checkpoints' (deploy/base/workers.yaml)."""
    store, spec = wanted.store, f"{wanted.workload.template}/spec"
    if store is None:
        return
    if store.storage_class is not None:
        path = "/spec/storageClassName"
        add = {"op": "add", "path": path, "value": store.storage_class}
        yield _Patch("PersistentVolumeClaim", "checkpoints", (add,))
        return
    if store.claim is not None:
        path = f"{spec}/volumes/2/persistentVolumeClaim/claimName"
        yield _of_workload(wanted, [_replace(path, store.claim)])
    else:
        paths = (f"{spec}/volumes/2", f"{spec}/containers/0/volumeMounts/2")
        yield _of_workload(wanted, [{"op": "remove", "path": path} for path in paths])
    yield _Removal("PersistentVolumeClaim", "checkpoints")


@dataclass(frozen=True)
class _Removal(_Patch):
    def lines(self) -> Iterator[str]:
        yield "  - patch: |-"
        yield "      $patch: delete"
        yield "      apiVersion: v1"
        yield f"      kind: {self.kind}"
        yield f"      metadata: {{name: {self.name}}}"


def _of_workload(wanted: Overlay, operations: Sequence[Mapping[str, object]]) -> _Patch:
    return _Patch(wanted.workload.kind, wanted.workload.name, tuple(operations))


def _replace(path: str, value: object) -> Mapping[str, object]:
    return {"op": "replace", "path": path, "value": value}
