"""The etcd keys of a job's records: docs/explanation/protocol.md, section 1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic.errors import ConfigError

# Control characters, and the surrogates to which Python decodes argument bytes that are not UTF-8.
_UNPRINTABLE = "\x00-\x1f\x7f-\x9f\ud800-\udfff"
# Generated for a job that was started without one, as by `elastic run --embedded-etcd`.
_GENERATED_RUN_ID = re.compile(r"job-[0-9a-f]{12}")
_FORBIDDEN_IN_RUN_ID = re.compile(f"[/{_UNPRINTABLE}]")
_FORBIDDEN_IN_PREFIX = re.compile(f"[{_UNPRINTABLE}]")


# Parts of a job's keys under which there are further ones: another job there would be in its lists.
_FOLDERS = frozenset({"nodes", "failure_reports", "hangs", "hang_stacks", "step_times"})


@dataclass(frozen=True)
class Keys:
    """The names under ``{prefix}/{run_id}/``.

    ``is_etcd_local``: etcd listens on this machine only, as the embedded one does, which ends with
    the job.
    """

    root: str  # ends with "/"
    is_etcd_local: bool = False

    @staticmethod
    def of(prefix: str, run_id: str, *, is_etcd_local: bool = False) -> Keys:
        """Check both parts and join them. Raises ConfigError."""
        if not run_id or _FORBIDDEN_IN_RUN_ID.search(run_id):
            raise ConfigError(
                f"run id {run_id!r} cannot be part of an etcd key",
                hint="use --rdzv-id with at least one character, without '/' "
                "and control characters",
            )
        if not prefix.startswith("/") or _FORBIDDEN_IN_PREFIX.search(prefix):
            raise ConfigError(
                f"prefix {prefix!r} must start with '/' and contain no control characters",
                hint="set prefix in --rdzv-conf, or ELASTIC_PREFIX",
            )
        root = f"{prefix.rstrip('/')}/{run_id}/"
        # (The first part cannot be in another job: a job's keys have at least one part before.)
        if reserved := _FOLDERS.intersection(root.split("/")[2:]):
            raise ConfigError(
                f"{root!r} may be among the keys of another job: it contains {min(reserved)!r}",
                hint="use another --rdzv-id or prefix, without "
                f"{', '.join(sorted(_FOLDERS))} as a part",
            )
        return Keys(root, is_etcd_local)

    @property
    def run_id(self) -> str:
        """The job's name, without the prefix."""
        return self.root.rstrip("/").rpartition("/")[2]

    @property
    def how_to_continue(self) -> str:
        """How users let a job go on that has ended without success."""
        if _GENERATED_RUN_ID.fullmatch(self.run_id):
            return "start it again: it continues from its last checkpoint, under a new id"
        again = "start it again under another --rdzv-id, from its last checkpoint"
        if self.is_etcd_local:  # nobody can delete keys of an etcd that has ended
            return again
        return f"{again}, or delete {self.done} in etcd to let it continue"

    @property
    def nodes(self) -> str:
        return f"{self.root}nodes/"

    def node(self, node_id: str) -> str:
        return f"{self.root}nodes/{node_id}"

    @property
    def leader(self) -> str:
        return f"{self.root}leader"

    @property
    def progress(self) -> str:
        return f"{self.root}progress"

    @property
    def world(self) -> str:
        return f"{self.root}world"

    @property
    def replicas(self) -> str:
        return f"{self.root}replicas"

    @property
    def failure_reports(self) -> str:
        return f"{self.root}failure_reports/"

    def failure_report(self, node_id: str) -> str:
        return f"{self.root}failure_reports/{node_id}"

    @property
    def hangs(self) -> str:
        return f"{self.root}hangs/"

    def hang(self, node_id: str) -> str:
        return f"{self.root}hangs/{node_id}"

    @property
    def hang_verdict(self) -> str:
        return f"{self.root}hang_verdict"

    @property
    def hang_stacks(self) -> str:
        return f"{self.root}hang_stacks/"

    def hang_stack(self, node_id: str) -> str:
        return f"{self.root}hang_stacks/{node_id}"

    @property
    def step_times(self) -> str:
        return f"{self.root}step_times/"

    def step_times_of(self, node_id: str) -> str:
        return f"{self.root}step_times/{node_id}"

    @property
    def profile(self) -> str:
        return f"{self.root}profile"

    @property
    def done(self) -> str:
        return f"{self.root}done"

    @property
    def secret(self) -> str:
        return f"{self.root}secret"
