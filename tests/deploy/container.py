"""A container without Docker: namespaces, a read-only root, uid 10001, no capabilities.

For Linux and root. The root is a tmpfs with read-only bind mounts of the contents of an image (the
system's /usr, this Python and its packages); /tmp, /dev/shm and the mounts of a test are writable.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from elastic.testing.waiting import eventually

REPOSITORY = Path(__file__).parents[2]
UID = 10001
# The network is that of this machine: tests reach etcd and probes on its loopback.
_UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
_SYSTEM = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_PYTHON = (sys.base_prefix, sys.prefix)
_PACKAGES = tuple(
    str(REPOSITORY / name)
    for name in ("elastic", "checkpoints", "examples", "torch_elastic_harness.py")
)
_DEVICES = ("null", "zero", "full", "random", "urandom")


def why_not() -> str | None:
    """The reason why containers are not available here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for mounts and namespaces"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces or mounts here: {tried.stderr.strip()}" if tried.returncode else None


class Container:
    """One process as PID 1 of its own, as a kubelet would start it.

    Args:
        command: the image's entrypoint and the pod's args.
        environ: the whole environment.
        folder: for the mount point and the log.
        mounts: writable folders of the host, by their path inside.
        setup: shell lines that add more under ``$root``.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        *,
        mounts: Mapping[str, Path] | None = None,
        setup: str = "",
    ) -> None:
        root = folder / "root"
        root.mkdir(parents=True)
        self.log = folder / "log"
        script = _script(root, command, environ, mounts or {}, setup)
        with self.log.open("wb") as output:
            self._unshare = subprocess.Popen(
                [*_UNSHARE, "bash", "-euc", script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """PID 1's pid outside."""
        parent = self._unshare.pid
        children = Path(f"/proc/{parent}/task/{parent}/children")
        return int(eventually(lambda: children.read_text().split(), "the container's PID 1")[0])

    def status(self, field: str) -> str:
        """A line of PID 1's /proc/.../status."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
        raise LookupError(field)

    def terminate(self) -> None:
        """The first step of a kubelet's termination."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        try:
            return self._unshare.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs after {timeout_s} s:\n{self.output}") from None

    @property
    def ended(self) -> bool:
        return self._unshare.poll() is not None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended:
            # The death of PID 1 ends all others. Killing unshare is not enough: the kernel clears
            # --kill-child for a process that changes its user, as this one does.
            os.kill(self.pid, signal.SIGKILL)
            self._unshare.wait()


def _script(
    root: Path,
    command: Sequence[str],
    environ: Mapping[str, str],
    mounts: Mapping[str, Path],
    setup: str,
) -> str:
    at = shlex.quote(str(root))
    lines = [
        f"root={at}",
        "mount --make-rprivate /",
        f"mount -t tmpfs -o mode=755 none {at}",
        f"bind() {{ mkdir -p {at}$1; mount --rbind $1 {at}$1; mount -o remount,bind,ro {at}$1; }}",
        f"mkdir -p {at}/proc {at}/dev/shm {at}/tmp",
        # Before the bind mounts: this checkout may itself be in /tmp.
        f"mount -t tmpfs -o mode=1777 none {at}/tmp",
        f"mount -t tmpfs -o mode=1777,size=256m none {at}/dev/shm",
    ]
    for path in (*_SYSTEM, *_PYTHON, *_PACKAGES):
        if os.path.islink(path):
            lines.append(f"ln -s {shlex.quote(os.readlink(path))} {at}{path}")
        elif os.path.isdir(path):
            lines.append(f"bind {shlex.quote(path)}")
        elif os.path.isfile(path):
            name = shlex.quote(path)
            lines.append(f"touch {at}{name}; mount --bind {name} {at}{name}")
    lines += [f"touch {at}/dev/{d}; mount --bind /dev/{d} {at}/dev/{d}" for d in _DEVICES]
    for inside, outside in mounts.items():
        lines.append(
            f"mkdir -p {at}{inside}; mount --bind {shlex.quote(str(outside))} {at}{inside}"
        )
    lines += [
        f"mount -t proc proc {at}/proc",
        setup,
        f"mount -o remount,ro {at}",
        f"exec env -i {shlex.join(f'{k}={v}' for k, v in environ.items())} /usr/sbin/chroot {at} "
        f"/usr/bin/setpriv --reuid={UID} --regid={UID} --clear-groups --no-new-privs "
        f"--bounding-set=-all --inh-caps=-all -- {shlex.join(command)}",
    ]
    return "\n".join(lines)
