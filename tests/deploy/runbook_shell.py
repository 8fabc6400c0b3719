"""The commands of the runbook (the pages of deploy/): read from fenced blocks, run against a model.

A shell that knows ``kubectl`` and ``elastic kube render`` (the real one), as far as the runbook
needs them. An unknown command is an error, unless NEEDS_A_CLUSTER names it with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kube_control_plane import ControlPlane, Key, key_of
from manifests import DEPLOY, Object, kustomize

from elastic.cli import main

# The pages of the runbook, one after the other.
RUNBOOK = "\n".join(
    (DEPLOY / name).read_text() for name in ("README.md", "failures.md", "options.md")
)
KINDS = {
    "statefulset": "StatefulSet",
    "job": "Job",
    "configmap": "ConfigMap",
    "pvc": "PersistentVolumeClaim",
    "pod": "Pod",
    "pods": "Pod",
    "secret": "Secret",
    "namespace": "Namespace",
}
# The languages of other fenced blocks. A block with commands has no language; otherwise it would
# not be run.
NO_COMMANDS = {"dockerfile", "text", "yaml"}
# Prefixes of commands that no model here supports, and the tests that cover them instead.
NEEDS_A_CLUSTER: Mapping[str, str] = {
    "docker build": "test_deploy_dockerfile.py reads the instructions; CI of a platform builds",
    "kind create": "a laptop's cluster",
    "kind load": "a laptop's cluster",
    "kubectl logs": "text of running programs",
    "kubectl port-forward": "a connection into a pod",
    "kubectl exec": "test_deploy_etcd_members.py runs these etcdctl commands on real members",
    "kubectl taint": "pod garbage collector; its times are cited in the runbook",
    "curl": "test_pod_lifecycle.py asks real agents for /readyz",
    "grep": "reads what a program has written",
    "tail": "reads what a program has written",
}


@dataclass(frozen=True)
class Command:
    """One simple command: the text between ``&&``, ``|`` and line ends."""

    section: str
    block: int  # which one of its section
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def commands(text: str) -> Iterator[Command]:
    """Every command of every fenced block without a language, in order."""
    section, number, block = "", 0, list[str]()
    inside: str | None = None
    for line in text.splitlines():
        if line.startswith("```"):
            if inside == "":
                number += 1
                yield from _commands_of(section, number, "\n".join(block))
            inside, block = (line[3:] if inside is None else None), []
            assert inside in {None, "", *NO_COMMANDS}, (
                f"{section}: {line}: commands have no language"
            )
        elif inside is not None:
            block.append(line)
        elif line.startswith("#"):
            section, number = line.lstrip("# "), 0
    assert inside is None, "a fence is not closed"


def _commands_of(section: str, number: int, block: str) -> Iterator[Command]:
    pending = ""
    for line in block.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation continues on the next line
            continue
        pending, simple = "", list[str]()
        for word in [*words, "&&"]:
            if word not in ("&&", "|", "&"):
                simple.append(word)
            elif simple:
                yield Command(section, number, tuple(simple))
                simple = []
    assert not pending, f"{section}: {pending}"


def needs_a_cluster(command: Command) -> str | None:
    """The entry of NEEDS_A_CLUSTER that names it."""
    words = [w for i, w in enumerate(command.words) if not _is_namespace(command.words, i)]
    return next((c for c in NEEDS_A_CLUSTER if words[: len(c.split())] == c.split()), None)


def _is_namespace(words: tuple[str, ...], index: int) -> bool:
    return words[index] == "-n" or (index > 0 and words[index - 1] == "-n")


class Failed(Exception):
    """The command has exited with a code other than 0; holds its output."""


class Shell:
    """``folder`` is the current directory; it has a link ``deploy`` to ours."""

    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.variables = {"N": "elastic-training"}
        if not (folder / "deploy").exists():
            (folder / "deploy").symlink_to(DEPLOY)

    def run(self, command: Command) -> None:
        """Raises Failed, or AssertionError for what this shell does not know."""
        if needs_a_cluster(command):
            return
        words = [re.sub(r"\$(\w+)", lambda m: self.variables[m[1]], w) for w in command.words]
        assignment = re.fullmatch(r"(\w+)=(\S+)", words[0])
        if assignment and len(words) == 1:
            self.variables[assignment[1]] = assignment[2]
        elif words[:3] == ["elastic", "kube", "render"]:
            self._render(words[3:])
        elif words[0] == "kubectl":
            self._kubectl(words[1:])
        else:
            raise AssertionError(f"{command.section}: unknown command: {command}")
        self.cluster.settle()

    def _render(self, flags: list[str]) -> None:
        """Runs the real command. `…` stands for the flags of the previous examples."""
        if "…" in flags:
            flags[flags.index("…") : flags.index("…") + 1] = [
                "--image=registry.example/train:1.4.2"
            ]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if main.main(["kube", "render", *flags]) != 0:
                raise Failed(f"elastic kube render {' '.join(flags)}")

    # kubectl -----------------------------------------------------------------------------------

    def _kubectl(self, words: list[str]) -> None:
        args = _parser().parse_intermixed_args(words)
        verb, *rest = args.words
        do = getattr(self, f"_{verb}", None)
        assert do is not None, f"unknown: kubectl {verb}"
        do(args, rest)

    def _apply(self, args: argparse.Namespace, rest: list[str]) -> None:
        _succeed(self.cluster.apply(objects_of(self.folder / args.kustomize)))

    def _delete(self, args: argparse.Namespace, rest: list[str]) -> None:
        if args.kustomize:
            for one in objects_of(self.folder / args.kustomize):
                self.cluster.delete(key_of(one), foreground=True)
            return
        if rest[0] == "node":
            return  # its pods are up to the pod garbage collector: see the runbook's table
        if rest == ["pod"]:
            labels = dict([args.selector.split("=")])
            for name in self.cluster.pods(args.namespace, labels):
                self.cluster.delete_pod(args.namespace, name)
            return
        for kind, name in _named(rest):
            key = (args.namespace, kind, name)
            if kind == "Pod":
                self.cluster.delete_pod(args.namespace, name)
            elif key in self.cluster.objects:
                self.cluster.delete(key, foreground=args.cascade == "foreground")
            elif not args.ignore_not_found:
                raise Failed(f"NotFound: {key}")

    def _scale(self, args: argparse.Namespace, rest: list[str]) -> None:
        (name,) = _named(rest)
        key = self._existing(args, *name)
        _succeed(self.cluster.change(key, lambda o: o["spec"].update(replicas=args.replicas)))

    def _patch(self, args: argparse.Namespace, rest: list[str]) -> None:
        (name,) = _named(rest)
        key = self._existing(args, *name)
        if args.patch_file:
            flags = [f"--patch-file={self.folder / args.patch_file}"]
        else:
            flags = [f"--type={args.type}", "-p", args.patch]
        _succeed(self.cluster.patch(key, flags))

    def _rollout(self, args: argparse.Namespace, rest: list[str]) -> None:
        what, *of = rest
        (name,) = _named(of)
        key = self._existing(args, *name)
        if what == "restart":
            # kubectl's polymorphichelpers/objectrestarter.go: an annotation of the template.
            _succeed(self.cluster.change(key, _restarted))
            return
        assert what == "status", what
        controller = self.cluster.sets[key]
        self.cluster.settle()
        # kubectl's polymorphichelpers/rollout_status.go: all are Ready, and the partition's number
        # of them updated.
        rolling = controller.spec.get("updateStrategy", {}).get("rollingUpdate") or {}
        partition = rolling.get("partition", 0)
        status, wanted = controller.status, controller.spec["replicas"]
        if status.ready < wanted or (status.updated < wanted - partition):
            raise Failed(f"rollout status would never return: {status}")

    def _wait(self, args: argparse.Namespace, rest: list[str]) -> None:
        self.cluster.settle()
        if args.wait_for == "delete":
            left = {*self.cluster.pods(args.namespace)} & {name for _, name in _named(rest)}
            if left:
                raise Failed(f"still there: {left}")
            return
        assert (args.wait_for, rest) == ("condition=complete", ["job/workers-finisher"])
        if not self.cluster.train_to_the_end(args.namespace):
            raise Failed("the finisher watches another run than the workers train")

    def _get(self, args: argparse.Namespace, rest: list[str]) -> None:
        if len(rest) > 1:
            for kind, name in _named(rest):
                self._existing(args, kind, name)
        else:
            assert KINDS[rest[0]] == "Pod"

    def _create(self, args: argparse.Namespace, rest: list[str]) -> None:
        kind, *more = rest
        if kind == "secret":
            assert more[0] == "generic", "`secret tls` has no ca.crt"
            more = more[1:]
        (name,) = more
        given = (args.from_literal or []) + (args.from_file or [])
        pairs = [p.split("=", 1) for p in given]
        namespace = "" if kind == "namespace" else args.namespace
        metadata = {"name": name, "namespace": namespace} if namespace else {"name": name}
        self.cluster.create(
            {"apiVersion": "v1", "kind": KINDS[kind], "metadata": metadata, "data": dict(pairs)}
        )

    def _drain(self, args: argparse.Namespace, rest: list[str]) -> None:
        """NODE is the machine of the worker with the highest ordinal that is Ready."""
        pods = self.cluster.sets[self.variables["N"], "StatefulSet", "workers"].pods
        highest = max(o for o, pod in pods.items() if pod.ready)
        if not self.cluster.evict_worker(self.variables["N"], f"workers-{highest}"):
            raise Failed("Cannot evict pod as it would violate the pod's disruption budget.")

    def _existing(self, args: argparse.Namespace, kind: str, name: str) -> Key:
        key = (args.namespace, kind, name)
        if key not in self.cluster.objects:
            raise Failed(f"NotFound: {key}")
        return key


_built: dict[str, tuple[Object, ...]] = {}


def objects_of(folder: Path) -> tuple[Object, ...]:
    """The current objects of the kustomization. Built once: all folders have the same depth."""
    text = (folder / "kustomization.yaml").read_text()
    if text not in _built:
        _built[text] = kustomize(folder)
    return _built[text]


def _restarted(one: dict[str, object]) -> None:
    template = one["spec"]["template"]  # type: ignore[index]
    notes = template["metadata"].setdefault("annotations", {})
    notes["kubectl.kubernetes.io/restartedAt"] = f"restart {len(notes)}"


def _named(words: list[str]) -> list[tuple[str, str]]:
    """``TYPE NAME...`` or ``TYPE/NAME ...``."""
    if "/" in words[0]:
        return [(KINDS[kind], name) for kind, _, name in (w.partition("/") for w in words)]
    return [(KINDS[words[0]], name) for name in words[1:]]


def _succeed(errors: list[str]) -> None:
    if errors:
        raise Failed("\n".join(errors))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("words", nargs="+")
    parser.add_argument("-n", dest="namespace", default="default")
    parser.add_argument("-k", dest="kustomize")
    parser.add_argument("-l", dest="selector")
    parser.add_argument("-o", dest="output")
    parser.add_argument("-p", dest="patch")
    parser.add_argument("--patch-file")
    parser.add_argument("--type", choices=("merge", "json", "strategic"), default="strategic")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--cascade", choices=("background", "foreground", "orphan"))
    parser.add_argument("--ignore-not-found", action="store_true")
    parser.add_argument("--wait")
    parser.add_argument("--for", dest="wait_for")
    parser.add_argument("--timeout")
    parser.add_argument("--from-literal", action="append")
    parser.add_argument("--from-file", action="append")
    parser.add_argument("--from-env-file")
    parser.add_argument("--ignore-daemonsets", action="store_true")
    parser.add_argument("--delete-emptydir-data", action="store_true")
    return parser
