"""What became of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.events.base import Event


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was committed, as seen by this rank."""

    name: str  # of the checkpoint
    step: int  # that it holds
    duration_s: float  # from the step's boundary until the checkpoint stood
    stall_s: float  # of it: what training waited for
    bytes: int  # that this rank wrote


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint could not be saved or used; training goes on with the others."""

    name: str  # of the checkpoint, or its step
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class PartNotCopied(Event):
    """This node's part of a checkpoint in memory has no copy on another node."""

    name: str  # of the checkpoint
    peer: str  # the node that should have it
    reason: str  # a sentence
