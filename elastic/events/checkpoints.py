"""Outcomes of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.events.base import Event


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was committed, as seen by this rank."""

    name: str  # of the checkpoint
    step: int  # of its state
    duration_s: float  # from the step boundary until the checkpoint was committed
    stall_s: float  # part of it for which training waited
    bytes: int  # written by this rank


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint could not be saved or used; training continues with the others."""

    name: str  # of the checkpoint, or its step
    reason: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class MemoryIntervalChanged(Event):
    """All ranks save to the nodes' memory at another interval, chosen from measured costs."""

    every_steps: int  # between two saves from now on
    before: int  # the interval that was in use
    reason: str  # what a save and a step cost


@dataclass(frozen=True, kw_only=True)
class PartNotCopied(Event):
    """This node's part of a checkpoint in memory has no copy on another node."""

    name: str  # of the checkpoint
    peer: str  # the node that should have it
    reason: str  # a sentence
