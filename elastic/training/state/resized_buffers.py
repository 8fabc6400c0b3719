"""Finds buffers that a module resizes when it loads a state.

Observers of torch's quantisation create their buffers empty, with the shape of the first batch's
statistics from then on, so those of a new process have another shape than those of a checkpoint.
Their ``_load_from_state_dict`` resizes them. Whether one does is tried with a copy of its module.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn


def resizes(module: nn.Module, key: str, saved: Mapping[str, Any]) -> bool:
    """Whether ``module`` can load its buffer ``key`` although its shape in ``saved`` differs."""
    path, _, name = key.rpartition(".")
    owner = module.get_submodule(path)
    loads = type(owner)._load_from_state_dict
    if loads is nn.Module._load_from_state_dict or name not in owner._buffers:
        return False
    errors: list[str] = []
    try:
        trial = copy.deepcopy(owner)
        prefix = f"{path}." if path else ""
        state = {k: v for k, v in saved.items() if k.startswith(prefix)}
        loads(trial, state, prefix, {}, True, [], [], errors)
    except Exception:  # noqa: BLE001  a module of the script's own: it cannot load this
        return False
    loaded = trial._buffers[name]
    return not errors and loaded is not None and loaded.shape == saved[key].shape
