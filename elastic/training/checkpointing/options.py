"""The script's configuration of checkpoints: folder, save policy and retention."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import checkpoints
from checkpoints import EverySteps, LatestN, RetentionPolicy, SavePolicy
from checkpoints.storage.local import LocalStorage
from checkpoints.storage.roots import storage_for
from elastic.arguments import described
from elastic.errors import ConfigError, TrainingError

EVERY_STEPS = 50
_IN_A_STORE = re.compile(r"(?!(?:file|local)://)[A-Za-z][A-Za-z0-9+.\-]*://")

WhenGiven = SavePolicy | int | None
KeepGiven = RetentionPolicy | int | None


@dataclass(frozen=True)
class Checkpoints:
    """The configuration of checkpoints. ``join(checkpoints="folder")`` uses the defaults.

    ``folder`` is a path on storage that all nodes share, a URL of an object store, or a
    :class:`checkpoints.Storage`. The end of training is always saved. ``memory`` is the number of
    steps between two saves to the nodes' memory. If it is chosen (True, or None with
    ``run.build``), saves take at most ``memory_overhead`` of training time: all ranks compute it
    from the durations of a save and of a step on the slowest rank. Raises ConfigError.

    >>> from checkpoints import EverySeconds, EverySteps, LatestN, EveryNSteps
    >>> policy = Checkpoints("ckpt", when=EverySteps(1000) | EverySeconds(600), keep=2)
    >>> policy.keeping
    LatestN(count=2)
    """

    folder: checkpoints.Root
    _: KW_ONLY
    when: WhenGiven = None  # a checkpoints.SavePolicy, or the steps between two saves (50)
    keep: RetentionPolicy | int = 3  # a policy, or the number of newest checkpoints to keep
    required: bool = False  # refuse to start from step 0 (exit code 65)
    # Steps between two saves to the nodes' memory. True: chosen from the measured costs of a save
    # and a step; None: the same with run.build, else off.
    memory: int | bool | None = None
    memory_overhead: float = 0.01  # fraction of training time for saves to memory, if chosen

    @property
    def local_folder(self) -> str | None:
        """The folder's absolute path; None for an object store.

        Raises :class:`checkpoints.ArgumentError` for an address that names no storage.
        """
        storage = self.folder
        if isinstance(storage, str) and _IN_A_STORE.match(storage):
            return None
        if isinstance(storage, str | os.PathLike):
            storage = storage_for(storage)
        return storage.folder if isinstance(storage, LocalStorage) else None

    def __post_init__(self) -> None:
        if not (isinstance(self.folder, str | os.PathLike) or hasattr(self.folder, "make_folder")):
            raise ConfigError(
                f"checkpoints={described(self.folder)} is no folder, no address and no storage",
                hint='elastic.join(checkpoints="/shared/job-1"), or "s3://bucket/job-1"',
            )
        _check_count("memory", self.memory if self.memory is not False else None)
        if not 0 < self.memory_overhead <= 1:
            raise ConfigError(
                f"memory_overhead={self.memory_overhead} must be above 0 and at most 1",
                hint="0.01: saves to the nodes' memory take at most 1 % of training time",
            )
        _check("when", self.when, SavePolicy, "EverySteps(100), EverySeconds(600), Automatic()")
        _check("keep", self.keep, RetentionPolicy, "LatestN(3), LatestN(2) | EveryNSteps(1000)")

    @property
    def saving(self) -> SavePolicy:
        """The save policy.

        Raises :class:`checkpoints.ArgumentError` for a number of steps below 1.
        """
        if isinstance(self.when, SavePolicy):
            return self.when
        return EverySteps(self.when or EVERY_STEPS)

    @property
    def memory_steps(self) -> int | None:
        """Steps between two saves to memory, if given; None: chosen, or disabled."""
        return None if isinstance(self.memory, bool) else self.memory

    @property
    def keeping(self) -> RetentionPolicy:
        """The retention policy.

        Raises :class:`checkpoints.ArgumentError` for a number below 1.
        """
        return self.keep if isinstance(self.keep, RetentionPolicy) else LatestN(self.keep)

    def amended(
        self, given: Checkpoints | checkpoints.Root | None, when: WhenGiven, keep: KeepGiven
    ) -> Checkpoints:
        """A copy with the arguments of ``run.steps``.

        Raises TrainingError for another folder: it is too late to change it. Raises ConfigError
        for policies given twice.
        """
        folder = given.folder if isinstance(given, Checkpoints) else given
        if folder is not None and not _is_same(folder, self.folder):
            raise TrainingError(
                f"checkpoints={_shown(folder)}, but this job saves to {_shown(self.folder)}",
                hint="set one folder, in elastic.join(checkpoints=…)",
            )
        if isinstance(given, Checkpoints):
            return _without_overrides(given, when, keep)
        policy = self
        if when is not None:
            policy = dataclasses.replace(policy, when=when)
        if keep is not None:
            policy = dataclasses.replace(policy, keep=keep)
        return policy


def checkpoints_from(
    given: Checkpoints | checkpoints.Root | None,
    env: Mapping[str, str] = os.environ,
    *,
    when: WhenGiven = None,
    keep: KeepGiven = None,
) -> Checkpoints | None:
    """Use ``join``'s argument, else ``ELASTIC_CHECKPOINTS``, else None: nothing is saved.

    Raises ConfigError for policies without a folder, and for policies given twice.
    """
    if isinstance(given, Checkpoints):
        return _without_overrides(given, when, keep)
    folder = given if given is not None else env.get("ELASTIC_CHECKPOINTS") or None
    if folder is not None:
        return Checkpoints(folder).amended(None, when, keep)
    if when is not None or keep is not None:
        raise ConfigError(
            f"when={when}, keep={keep} without a checkpoint folder",
            hint="pass join(checkpoints=…), or set ELASTIC_CHECKPOINTS",
        )
    return None


def _without_overrides(given: Checkpoints, when: WhenGiven, keep: KeepGiven) -> Checkpoints:
    if when is not None or keep is not None:
        raise ConfigError(
            f"when={when}, keep={keep} in addition to checkpoints=Checkpoints(…)",
            hint="pass them to Checkpoints(folder, when=…, keep=…)",
        )
    return given


def _check(name: str, value: object, policy: type[object], examples: str) -> None:
    if value is None or isinstance(value, policy):
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(
            f"{name}={value!r} is neither an integer nor a policy",
            hint=f"from checkpoints import …: {examples}; policies are combined with |",
        )
    _check_count(name, value)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name}={value} must be at least 1")


def _is_same(one: checkpoints.Root, other: checkpoints.Root) -> bool:
    if isinstance(one, (str, os.PathLike)) and isinstance(other, (str, os.PathLike)):
        return os.fspath(one) == os.fspath(other)
    return one is other


def _shown(root: object) -> str:
    place = root if isinstance(root, (str, os.PathLike)) else getattr(root, "place", root)
    return str(place)
