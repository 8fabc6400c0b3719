"""The names in a checkpoint folder; only this module builds and parses them.

::

    step-000001200.g7.3f9c                    committed
    .tmp-step-000001300.g7.a1b2               an attempt: not committed yet
    .tmp-removed-step-000000900.g6.77aa       a committed one being removed
    00000-of-00004.safetensors                one writer's tensors
    part-00000-of-00004.json                  one writer's record that its file is complete
    failed-00000-of-00004.json                one writer's record that it could not write its file
    .summaries.json                           what retention policies ask for, of all checkpoints
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from checkpoints.errors import ArgumentError

MANIFEST = "manifest.json"
LATEST = "LATEST"
SUMMARIES = ".summaries.json"
MAX_WORLD_SIZE = 99_999
MAX_STEP = 10**15
MAX_GENERATION = 10**15

_ATTEMPT_PREFIX = ".tmp-"
REMOVED_PREFIX = ".tmp-removed-"
LATEST_PREFIX = ".tmp-LATEST-"
_NONCE = re.compile(r"[0-9A-Za-z]{1,64}")
_FOLDER = re.compile(r"step-(\d{9,16})\.g(\d{1,16})\.([0-9A-Za-z]{1,64})")
_WRITER_FILE = re.compile(r"(\d{5})-of-(\d{5})\.safetensors")
_PART_FILE = re.compile(r"part-(\d{5})-of-(\d{5})\.json")
_FAILURE_FILE = re.compile(r"failed-(\d{5})-of-(\d{5})\.json")


def new_nonce() -> str:
    """A fresh nonce. All writers of a world share one.

    >>> len(new_nonce())
    8
    """
    return secrets.token_hex(4)


@dataclass(frozen=True)
class CheckpointName:
    """Step, generation and nonce: the identity of a checkpoint. ``str()`` is the committed name.

    >>> str(CheckpointName(1200, 7, "3f9c"))
    'step-000001200.g7.3f9c'
    >>> CheckpointName(1200, 7, "3f9c").attempt
    '.tmp-step-000001200.g7.3f9c'

    Raises :class:`ArgumentError` for numbers out of range, and a nonce that is not 1 to 64 letters
    and digits.
    """

    step: int
    generation: int
    nonce: str

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise ArgumentError(f"step {self.step} is not between 0 and {MAX_STEP}")
        if not 0 <= self.generation <= MAX_GENERATION:
            raise ArgumentError(
                f"generation {self.generation} is not between 0 and {MAX_GENERATION}"
            )
        if not _NONCE.fullmatch(self.nonce):
            raise ArgumentError(
                f"nonce {self.nonce!r} is not 1 to 64 letters and digits",
                hint="checkpoints.new_nonce() returns one; all writers of a world share it.",
            )

    def __str__(self) -> str:
        return f"step-{self.step:09d}.g{self.generation}.{self.nonce}"

    @property
    def attempt(self) -> str:
        """The folder in which the checkpoint is written before it is committed."""
        return f"{_ATTEMPT_PREFIX}{self}"

    @property
    def removed(self) -> str:
        """The folder to which it is renamed before its files are removed."""
        return f"{REMOVED_PREFIX}{self}"

    @property
    def age_order(self) -> tuple[int, int, str]:
        """Sort key, oldest first: by generation, then step; the nonce breaks ties."""
        return (self.generation, self.step, self.nonce)


def parse_committed(folder: str) -> CheckpointName | None:
    """The name of a committed checkpoint's folder, or None for any other name."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    step, generation = int(match[1]), int(match[2])
    if step > MAX_STEP or generation > MAX_GENERATION:
        return None
    name = CheckpointName(step, generation, match[3])
    return name if str(name) == folder else None


def parse_attempt(folder: str) -> CheckpointName | None:
    """The name of an attempt's folder, or None for any other name."""
    if not folder.startswith(_ATTEMPT_PREFIX):
        return None
    return parse_committed(folder.removeprefix(_ATTEMPT_PREFIX))


def writer_file(rank: int, world_size: int) -> str:
    return f"{rank:05d}-of-{world_size:05d}.safetensors"


def part_file(rank: int, world_size: int) -> str:
    return f"part-{rank:05d}-of-{world_size:05d}.json"


def failure_file(rank: int, world_size: int) -> str:
    return f"failed-{rank:05d}-of-{world_size:05d}.json"


def parse_writer_file(file: str) -> tuple[int, int] | None:
    """(rank, world size) of a writer's file, or None for any other name."""
    return _ranks(_WRITER_FILE.fullmatch(file))


def parse_part_file(file: str) -> tuple[int, int] | None:
    """(rank, world size) of a part, or None for any other name."""
    return _ranks(_PART_FILE.fullmatch(file))


def parse_failure_file(file: str) -> tuple[int, int] | None:
    """(rank, world size) of a failure record, or None for any other name."""
    return _ranks(_FAILURE_FILE.fullmatch(file))


def _ranks(match: re.Match[str] | None) -> tuple[int, int] | None:
    if match is None:
        return None
    rank, world_size = int(match[1]), int(match[2])
    return (rank, world_size) if rank < world_size else None
