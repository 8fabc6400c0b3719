"""Validation of logged values: numbers, and tensors with one element."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsFloat

import torch

from elastic import arguments
from elastic.errors import ConfigError

Loggable = SupportsFloat | torch.Tensor
_RECENT_MEANS = 1000
Scalar = float | torch.Tensor
"""A number, or its pending copy from a device: see
:mod:`~elastic.training.observers.device_reads`."""


class WorldMean(float):
    """A logged mean over all ranks; other values are one rank's."""

    __slots__ = ()


class RecentMeans:
    """The last means of ``run.mean``, by their identity.

    They are plain floats: ``torch.load`` refuses a file with an object of a class of ours.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, float] = {}  # refers to them, so that no id is used again

    def add(self, mean: float) -> float:
        """Record a mean, and return it."""
        mean = mean * 1.0  # an object that nothing else refers to, unlike math.nan
        self._by_id[id(mean)] = mean
        if len(self._by_id) > _RECENT_MEANS:
            del self._by_id[next(iter(self._by_id))]
        return mean

    def has(self, value: object) -> bool:
        """Whether it is one of them."""
        return id(value) in self._by_id


def weighted(weight: object, values: Iterable[tuple[str, object]]) -> list[float]:
    """The weight, and each value times the weight; 0 where the weight is 0.

    Raises ConfigError for a negative weight, and for a value that is not a number.
    """
    hint = "run.mean(len(batch), loss=loss): the weight, then values"
    share = arguments.weight("run.mean: weight ", weight, hint=hint)
    if not share:
        return [0.0 for _ in (None, *values)]
    hint = "a number, or a tensor with one element: loss=losses.mean()"
    numbers = [arguments.real_number(f"run.mean: {n}=", v, hint=hint) for n, v in values]
    return [share, *(number * share for number in numbers)]


def scalar_of(name: object, value: object) -> Scalar:
    """Convert a value to a number or, for a tensor on a device, to a pending copy.

    Raises ConfigError, which names the value, for anything else.
    """
    kind = type(value)
    if kind is float:
        scalar: Scalar = value  # type: ignore[assignment]
    elif isinstance(value, torch.Tensor):
        scalar = _scalar_of_tensor(name, value)
    else:
        scalar = _float_of(name, value)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"run.log({{{name!r}: …}}): the name of a value must be a non-empty string",
            hint="run.log(loss=loss), or run.log({'train/loss': loss})",
        )
    return scalar


def _scalar_of_tensor(name: object, tensor: torch.Tensor) -> Scalar:
    if hasattr(tensor, "full_tensor"):  # a DTensor
        raise _refusal(name, "a sharded tensor", f"run.log({name}=value.full_tensor())")
    if tensor.numel() != 1 or tensor.is_complex() or tensor.is_meta:
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
        raise _refusal(name, what, f"run.log({name}=value.mean())")
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return float(tensor)
    # Copied now, because the script may change the tensor in place; into pinned memory, so that
    # neither this call nor the device waits (aten/src/ATen/native/TensorConversions.cpp).
    return tensor.to("cpu", non_blocking=True)


def _float_of(name: object, value: object) -> float:
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        raise _refusal(name, f"{_shown(value)}, a {type(value).__name__},", "log numbers only")
    try:
        return float(value)
    except (TypeError, ValueError):
        what = f"a {type(value).__name__} of several values,"
        raise _refusal(name, what, f"run.log({name}=value.mean())") from None


def _refusal(name: object, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"run.log({name}=…): {what} is not a number", hint=remedy)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
