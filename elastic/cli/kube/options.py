"""The flags of ``elastic kube render``, and rules between them. Everything is checked here, before
anything is written."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from elastic.cli.command_parser import CommandParser
from elastic.cli.kube import components, names, stores
from elastic.cli.kube.job import (
    SHARED_NAMESPACE,
    WORKLOADS,
    Access,
    Image,
    Overlay,
    Placement,
    Resources,
    Store,
)
from elastic.cli.launch.flags import node_range
from elastic.errors import ConfigError
from elastic.tuning.timeouts import for_pod

# `NAME-workers-finisher`, `NAME-workers-workers-0-0-x7k2p` and their labels: 63 characters at most.
_LONGEST_NAME = 32
# The StatefulSet's partition, which holds changed templates back: deploy/base/workers.yaml.
_MAX_NODES = 1_000_000
# Names of etcd administrators (deploy/README.md, A role for each job).
_ADMINISTRATORS = ("root", "etcd-client")
# torchrun's default, with which an agent of several nodes refuses to start (rendezvous/handler.py).
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
_T = TypeVar("_T")


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
        "--deploy",
        type=Path,
        default=Path("deploy"),
        metavar="DIR",
        help="the project's deploy/ folder (default: ./deploy)",
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="write a kustomization to this folder, for git and `kubectl apply -k`, instead of "
        "printing manifests",
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
        help=f"add one of {', '.join(components.KNOWN)}; may be repeated",
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


def overlay(args: argparse.Namespace, folder: Path) -> Overlay:
    """Check everything, for a kustomization in ``folder``. Raises ConfigError."""
    if not (args.deploy / "overlays" / args.overlay / "kustomization.yaml").is_file():
        raise ConfigError(
            f"--deploy={args.deploy} contains no overlays/{args.overlay}",
            hint="name the folder deploy/ of this project's source",
        )
    chosen = components.chosen(args.components, args.overlay, args.name)
    store = stores.store(args.checkpoints) if args.checkpoints is not None else None
    name = _name(args.name, args.overlay)
    access = _access(args, store)
    labels = _labels(args.label)
    stores.check_identity(access.account_annotations, labels)
    return Overlay(
        overlay=args.overlay,
        deploy=os.path.relpath(args.deploy.resolve(), folder.resolve()),
        namespace=_namespace(args, "rdma" in chosen),
        name=name,
        components=(*chosen, *stores.components(store, access)),
        nodes=_nodes(args.nodes),
        processes=_gpus(args.gpus_per_node, args.overlay),
        run_id=_run_id(args.run_id, name),
        grace_s=_grace(args.grace, chosen),
        store=store,
        script=(args.script, *args.arguments) if args.script else (),
        resources=_resources(args, store),
        placement=_placement(args),
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
    names.label_name("--name", name)
    if not name[0].isalpha() or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"--name={name} cannot begin the names of Services and Jobs",
            hint=f"begin with a letter, and use {_LONGEST_NAME} characters at most",
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
    namespace = names.label_name("--namespace", args.namespace)
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
            hint="add --image=REGISTRY/NAME:TAG (deploy/README.md, Images)",
        )
    name, tag, digest = names.image("--image", image)
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
    return names.run_id("--run-id", run_id)


def _grace(grace_s: int | None, chosen: Sequence[str]) -> int | None:
    if grace_s is None:
        return None
    if "spot" in chosen:
        raise ConfigError(
            f"--grace={grace_s} with --with=spot, which sets it to the clouds' preemption notice",
            hint="omit one of the two",
        )
    for_pod(grace_s)
    return grace_s


def _resources(args: argparse.Namespace, store: Store | None) -> Resources:
    if args.storage_size is not None and store is not None and store.storage_class is None:
        raise ConfigError(
            f"--storage-size={args.storage_size} with --checkpoints={args.checkpoints}: no claim "
            "is created",
            hint="omit one of the two",
        )
    return Resources(
        cpu=_given(names.cpu, "--cpu", args.cpu),
        memory_bytes=_given(names.size_bytes, "--memory", args.memory),
        storage_bytes=_given(names.size_bytes, "--storage-size", args.storage_size),
    )


def _placement(args: argparse.Namespace) -> Placement:
    flag = "--node-selector"
    return Placement(
        node_selector=_mapping(flag, (names.label(flag, text) for text in args.node_selector)),
        tolerations=tuple(names.toleration("--toleration", text) for text in args.toleration),
        priority_class=_given(names.subdomain, "--priority-class", args.priority_class),
    )


def _access(args: argparse.Namespace, store: Store | None) -> Access:
    flag = "--service-account-annotation"
    environment = _mapping("--env", (names.variable("--env", text) for text in args.env))
    url = store.url if store else None
    return Access(
        pull_secrets=_secrets("--image-pull-secret", args.image_pull_secret),
        environment=environment,
        environment_secrets=_secrets("--env-from-secret", args.env_from_secret),
        account_annotations=_mapping(
            flag, (names.annotation(flag, text) for text in args.service_account_annotation)
        ),
        ports=tuple(sorted(stores.ports(environment) - {443})) if url else (),
    )


def _secrets(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names.subdomain(flag, name) for name in given))


def _labels(given: Sequence[str]) -> Mapping[str, str]:
    labels = _mapping("--label", (names.label("--label", text) for text in given))
    for key in labels:
        free = key.startswith("app.kubernetes.io/") or not names.is_of_kubernetes(key)
        if key in _OWN_LABELS or key.startswith(_OWN_PREFIXES) or not free:
            raise ConfigError(
                f"--label={key}=…: selectors, policies or controllers depend on {key}",
                hint="choose another key, for example with your own prefix: example.com/team",
            )
    return labels


def _mapping(flag: str, pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise ConfigError(
                f"{flag}={key} is given as {found[key]!r} and as {value!r}", hint="choose one"
            )
    return found


def _given(check: Callable[[str, str], _T], flag: str, text: str | None) -> _T | None:
    return None if text is None else check(flag, text)
