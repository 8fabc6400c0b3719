"""What steps along with an optimizer, and is not tracked: schedulers and gradient scalers.

Nothing fails without them. A joining node begins the schedule anew, a step that is done again
steps it twice, and every rank trains at another learning rate. So they are looked for, once, when
their optimizer steps for the first time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import TrainingError

_DEPTH = 3  # of objects within tracked ones: a SequentialLR, in a wrapper of the script's own
_FRAMES = 12  # between a hook of an optimizer and the scaler that has called it
_OF_SCALERS = GradScaler.step.__code__.co_filename
_OPAQUE = (torch.Tensor, nn.Module, torch.optim.Optimizer)


def require_tracked(name: str, optimizer: torch.optim.Optimizer, tracked: list[object]) -> None:
    """Raise TrainingError for a scheduler of ``optimizer``, or the scaler that calls it now, that
    is none of the ``tracked`` objects nor in one of them. ``name`` is the optimizer's."""
    if _untracked(optimizer, tracked) is None:
        return
    gc.collect()  # a scheduler of an attempt that is over may only wait to be freed
    if (one := _untracked(optimizer, tracked)) is not None:
        raise _refusal(name, one)


def _untracked(
    optimizer: torch.optim.Optimizer, tracked: list[object]
) -> LRScheduler | GradScaler | None:
    found: list[LRScheduler | GradScaler] = [*_schedulers(optimizer), *_calling_scaler()]
    known = _ids(tracked, _DEPTH) if found else set()
    return next((one for one in found if id(one) not in known), None)


def _schedulers(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    """The garbage collector knows who refers to the optimizer: an object, or its dict."""
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, LRScheduler):
            yield holder
        elif type(holder) is dict and holder.get("optimizer") is optimizer:
            yield from (o for o in gc.get_referrers(holder) if isinstance(o, LRScheduler))


def _calling_scaler() -> Iterator[GradScaler]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        # The locals of other frames are not read: until 3.12 that keeps alive whatever they hold.
        if frame.f_code.co_filename == _OF_SCALERS:
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, GradScaler) and scaler.is_enabled():
                yield scaler
                return
        frame = frame.f_back


def _ids(objects: Iterable[object], depth: int) -> set[int]:
    """Of the objects, and of what they hold."""
    found = set()
    for one in objects:
        found.add(id(one))
        if depth and not isinstance(one, _OPAQUE):
            found |= _ids(_held(one), depth - 1)
    return found


def _held(holder: object) -> Iterable[object]:
    if isinstance(holder, (list, tuple)):
        return holder
    return list((holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).values())


def _refusal(name: str, untracked: LRScheduler | GradScaler) -> TrainingError:
    kind = type(untracked).__name__
    if isinstance(untracked, GradScaler):
        return TrainingError(
            f"{kind} scales the gradients of {name} and is not tracked: a joining node would "
            "scale by another factor than the other ranks",
            hint="run.track(optimizer=optimizer, scaler=scaler)",
        )
    return TrainingError(
        f"{kind} sets the learning rate of {name} and is not tracked: a joining node would begin "
        "its schedule anew, and a step that is done again would step it twice",
        hint="run.track(optimizer=optimizer, scheduler=scheduler)",
    )
