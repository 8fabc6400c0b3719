"""The patches of `elastic kube render`'s kustomization: changes that no other field can express.

They apply to the workload, after components and before names get their prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elastic.cli.kube.job import Overlay, Store

Operation = Mapping[str, object]

INSTANCE = "app.kubernetes.io/instance"
GIB = 2**30
# Per GPU: an eighth of what deploy/components/gpu requests for a machine with eight.
_CPUS, _MEMORY_BYTES = 4, 32 * GIB
_SHARED_MEMORY = 4  # shared memory is 1/4 of the memory, and counts towards it
# Volumes of deploy/base/workers.yaml, and those that components/etcd-client-tls adds.
_SHM, _CHECKPOINTS, _ETCD_CLIENT = 1, 2, 3


@dataclass(frozen=True)
class _Patch:
    kind: str
    name: str
    operations: tuple[Operation, ...] = ()

    def lines(self) -> Iterator[str]:
        yield f"  - target: {{kind: {self.kind}, name: {self.name}}}"
        yield "    patch: |-"
        for operation in self.operations:
            yield f"      - {json.dumps(operation)}"


@dataclass(frozen=True)
class _Removal(_Patch):
    def lines(self) -> Iterator[str]:
        yield "  - patch: |-"
        yield "      $patch: delete"
        yield "      apiVersion: v1"
        yield f"      kind: {self.kind}"
        yield f"      metadata: {{name: {self.name}}}"


def patches(wanted: Overlay) -> Iterator[str]:
    """The field ``patches``, if there are any."""
    found = [
        *_workload_patch(wanted),
        *_queue_patches(wanted),
        *_account_patches(wanted),
        *_name_patches(wanted),
        *_claim_patches(wanted),
        *_policy_patches(wanted),
    ]
    if found:
        yield "patches:"
        for patch in found:
            yield from patch.lines()


# The pods ----------------------------------------------------------------------------------------


def _workload_patch(wanted: Overlay) -> Iterator[_Patch]:
    spec = f"{wanted.workload.template}/spec"
    operations = [
        *_script(wanted, spec),
        *_resources(wanted, spec),
        *_placement(wanted, spec),
        *_environment(wanted, spec),
        *_certificate(wanted, f"{spec}/volumes/{_ETCD_CLIENT}"),
        *_volumes(wanted.store, spec),  # removes one: last
    ]
    if operations:
        yield _Patch(wanted.workload.kind, wanted.workload.name, tuple(operations))


def _queue_patches(wanted: Overlay) -> Iterator[_Patch]:
    """Kueue refuses a Job whose minimum parallelism is not below its parallelism (its webhook:
    ``validatePartialAdmissionCreate``)."""
    low, high = wanted.nodes or (0, 1)
    if "kueue" in wanted.components and wanted.workload.kind == "Job" and low == high:
        path = "/metadata/annotations/kueue.x-k8s.io~1job-min-parallelism"
        yield _Patch("Job", wanted.workload.name, ({"op": "remove", "path": path},))


def _script(wanted: Overlay, spec: str) -> Iterator[Operation]:
    if wanted.script:
        # The kubelet expands $(NAME); escape it for the script.
        words = [word.replace("$(", "$$(") for word in wanted.script]
        yield _replace(f"{spec}/containers/0/args", ["run", *words])


def _resources(wanted: Overlay, spec: str) -> Iterator[Operation]:
    """The given resources, or the defaults for the node's GPUs."""
    cpu, memory_bytes = wanted.resources.cpu, wanted.resources.memory_bytes
    if wanted.processes is not None:
        cpu = cpu or str(_CPUS * wanted.processes)
        memory_bytes = memory_bytes or _MEMORY_BYTES * wanted.processes
    path = f"{spec}/containers/0/resources"
    if cpu is not None:
        yield _replace(f"{path}/requests/cpu", cpu)
    if memory_bytes is not None:
        yield _replace(f"{path}/requests/memory", quantity(memory_bytes))
        yield _replace(f"{path}/limits/memory", quantity(memory_bytes))
        shared = quantity(memory_bytes // _SHARED_MEMORY)
        yield _test(f"{spec}/volumes/{_SHM}/name", "shm")
        yield _replace(f"{spec}/volumes/{_SHM}/emptyDir/sizeLimit", shared)


def _placement(wanted: Overlay, spec: str) -> Iterator[Operation]:
    placement = wanted.placement
    if placement.node_selector:
        yield _add(f"{spec}/nodeSelector", dict(placement.node_selector))
    for toleration in placement.tolerations:
        yield _add(f"{spec}/tolerations/-", dict(toleration))
    if placement.priority_class is not None:
        yield _add(f"{spec}/priorityClassName", placement.priority_class)


def _environment(wanted: Overlay, spec: str) -> Iterator[Operation]:
    container = f"{spec}/containers/0"
    for name in wanted.access.environment_secrets:
        yield _add(f"{container}/envFrom/-", {"secretRef": {"name": name}})
    for name, value in wanted.access.environment.items():
        # The kubelet expands $(NAME) here, too.
        variable = {"name": name, "value": value.replace("$(", "$$(")}
        yield _add(f"{container}/env/-", variable)


def _volumes(store: Store | None, spec: str) -> Iterator[Operation]:
    if store is None or store.storage_class is not None:
        return
    volume, mount = f"{spec}/volumes/{_CHECKPOINTS}", f"{spec}/containers/0/volumeMounts/2"
    yield _test(f"{volume}/name", "checkpoints")
    yield _test(f"{mount}/name", "checkpoints")
    if store.claim is not None:
        yield _replace(f"{volume}/persistentVolumeClaim/claimName", store.claim)
    else:
        yield {"op": "remove", "path": volume}
        yield {"op": "remove", "path": mount}


def _certificate(wanted: Overlay, volume: str) -> Iterator[Operation]:
    if wanted.name is not None:
        yield _test(f"{volume}/name", "etcd-client")
        yield _replace(f"{volume}/secret/secretName", _secret_of(wanted.name))


# Other objects -----------------------------------------------------------------------------------


def _account_patches(wanted: Overlay) -> Iterator[_Patch]:
    """Set registry secrets on the service account, which works for every workload type."""
    pull, annotations = wanted.access.pull_secrets, wanted.access.account_annotations
    secrets = [_add("/imagePullSecrets", [{"name": name} for name in pull])] if pull else []
    own = [_add("/metadata/annotations", dict(annotations))] if annotations else []
    if secrets or own:
        yield _Patch("ServiceAccount", "workers", (*secrets, *own))
    if secrets and wanted.workload.finisher:
        yield _Patch("ServiceAccount", "workers-finisher", tuple(secrets))


def _name_patches(wanted: Overlay) -> Iterator[_Patch]:
    """Names that kustomize does not recognize as names, or as this job's."""
    if wanted.name is None:
        return
    yield _Patch(
        "Certificate",
        "etcd-user",
        (
            _replace("/spec/commonName", wanted.name),
            _replace("/spec/secretName", _secret_of(wanted.name)),
        ),
    )
    own = "podSelector/matchLabels/" + INSTANCE.replace("/", "~1")
    yield _Patch(
        "NetworkPolicy",
        "workers",
        (
            _replace(f"/spec/ingress/0/from/0/{own}", wanted.name),
            _replace(f"/spec/egress/0/to/0/{own}", wanted.name),
        ),
    )
    if wanted.workload.finisher:
        workers = f"{wanted.name}-workers"
        yield _Patch(
            "Job",
            "workers-finisher",
            (
                _test("/spec/template/spec/containers/0/args/1", "--statefulset=workers"),
                _replace("/spec/template/spec/containers/0/args/1", f"--statefulset={workers}"),
                *_certificate(wanted, "/spec/template/spec/volumes/1"),
            ),
        )
        names = "/rules/0/resourceNames/0"
        yield _Patch(
            "Role", "workers-finisher", (_test(names, "workers"), _replace(names, workers))
        )


def _secret_of(name: str) -> str:
    """The secret of the job's own etcd certificate (components/shared-etcd)."""
    return f"{name}-etcd-user-tls"


def _claim_patches(wanted: Overlay) -> Iterator[_Patch]:
    store = wanted.store or Store()
    operations = []
    if store.storage_class is not None:
        operations.append(_add("/spec/storageClassName", store.storage_class))
    if wanted.resources.storage_bytes is not None:
        size = quantity(wanted.resources.storage_bytes)
        operations.append(_replace("/spec/resources/requests/storage", size))
    if operations:
        yield _Patch("PersistentVolumeClaim", "checkpoints", tuple(operations))
    if store.claim is not None or store.url is not None:
        yield _Removal("PersistentVolumeClaim", "checkpoints")


def _policy_patches(wanted: Overlay) -> Iterator[_Patch]:
    """Egress to stores and proxies on ports other than 443."""
    rules = [{"ports": [{"port": port, "protocol": "TCP"}]} for port in wanted.access.ports]
    if rules:
        operations = tuple(_add("/spec/egress/-", rule) for rule in rules)
        yield _Patch("NetworkPolicy", "workers-to-object-store", operations)


def quantity(size_bytes: int) -> str:
    """Bytes as Kubernetes writes them, in the largest unit that is exact.

    >>> quantity(256 * 2**30), quantity(1536 * 2**20), quantity(10**9)
    ('256Gi', '1536Mi', '1000000000')
    """
    for unit, power in (("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size_bytes % 2**power == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def _add(path: str, value: object) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _replace(path: str, value: object) -> Operation:
    return {"op": "replace", "path": path, "value": value}


def _test(path: str, value: object) -> Operation:
    """Fail if the manifests no longer have the structure that this code expects."""
    return {"op": "test", "path": path, "value": value}
