"""Every private name of FSDP that workers use: FSDP1's mark, and FSDP2's groups of parameters.

Follows the rules of :mod:`elastic.torch_private`.
"""

from __future__ import annotations

from typing import Any

import torch

# FSDP1 ---------------------------------------------------------------------------------------


def is_flat_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a flat parameter, to which FSDP1 concatenates a module's parameters.

    Not among :data:`NAMES`: a torch without FSDP1 has no tensors with this mark.
    """
    return getattr(tensor, "_is_flat_param", False) is True


# FSDP2 ---------------------------------------------------------------------------------------
#
# Not among :data:`NAMES`: importing it takes a second. tests/integration/test_sharded_options.py
# fails on a torch that has other names.


def fsdp_holds_gradients(part: Any) -> bool:
    """Whether a module of ``fully_shard`` has gradients of passes that reduced none
    (``set_requires_gradient_sync(False)``)."""
    for group in _fsdp_groups(part):
        for parameter in group.fsdp_params:
            if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                return True
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None and unsharded.grad is not None:
                return True
    return False


def fsdp_is_root(part: Any) -> bool:
    """Whether torch has found, in the first forward pass, that no other module of ``fully_shard``
    is around this one. Before that ``reset_iter_state`` raises AttributeError (torch 2.13)."""
    return getattr(part._get_fsdp_state(), "_is_root", None) is True


def fsdp_settings(part: Any) -> list[str]:
    """The methods by which the script has changed how a module of ``fully_shard`` reduces."""
    changed = []
    for group in _fsdp_groups(part):
        if getattr(group, "gradient_divide_factor", None) is not None:
            changed.append("set_gradient_divide_factor")
        if getattr(group, "_all_reduce_hook", None) is not None:
            changed.append("set_all_reduce_hook")
        scatter = type(getattr(group, "_reduce_scatter_comm", None)).__name__
        if scatter not in ("DefaultReduceScatter", "NoneType"):
            changed.append("set_custom_reduce_scatter")
    return changed


def fsdp_originals(part: Any) -> list[tuple[torch.Tensor, object]]:
    """The sharded parameters of a module of ``fully_shard``, each with an identity that tied ones
    share; None if torch does not record it."""
    return [
        (parameter.sharded_param, getattr(parameter, "_orig_param_uid", None))
        for group in _fsdp_groups(part)
        for parameter in group.fsdp_params
    ]


def _fsdp_groups(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one, in older versions
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
