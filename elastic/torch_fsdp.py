"""Every private name of FSDP that workers use: FSDP1's mark, and FSDP2's groups of parameters.

Follows the rules of :mod:`elastic.torch_private`.
"""

from __future__ import annotations

from collections.abc import Callable
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


def fsdp_held_gradients(part: Any) -> list[torch.Tensor]:
    """The gradients of a module of ``fully_shard`` from passes that reduced none
    (``set_requires_gradient_sync(False)``)."""
    held = []
    for group in _fsdp_groups(part):
        for parameter in group.fsdp_params:
            held.append(getattr(parameter, "unsharded_accumulated_grad", None))
            held.append(getattr(getattr(parameter, "_unsharded_param", None), "grad", None))
    return [gradient for gradient in held if gradient is not None]


def fsdp_wrap_reduce_scatters(part: Any, wrap: Callable[[Any], Any]) -> None:
    """Replace each reduce-scatter of a module of ``fully_shard`` by ``wrap`` of it.

    ``FSDPModule.set_custom_reduce_scatter`` does not return the one it replaces, which may be the
    script's own, and refuses a module with several groups of parameters (torch 2.13).
    """
    for group in _fsdp_groups(part):
        group._reduce_scatter_comm = wrap(group._reduce_scatter_comm)


def fsdp_reset(part: Any) -> None:
    """Reset the state of an interrupted step, if this module of ``fully_shard`` is the outermost
    one.

    Torch finds that out in the first forward pass, before which there is nothing to reset and
    ``reset_iter_state`` raises AttributeError (torch 2.13).
    """
    state = part._get_fsdp_state()
    if getattr(state, "_is_root", None) is not True:
        return
    if hasattr(part, "reset_iter_state"):
        part.reset_iter_state()
    else:
        _reset_before_2_13(state)


def _reset_before_2_13(root: Any) -> None:
    """What ``reset_iter_state`` does, for torch 2.11 and 2.12, which lack it.

    Everything that ends with a forward or a backward pass returns to its value before the pass
    (``FSDPState._post_forward`` and ``_root_post_backward_final_callback``, and
    ``FSDPParamGroup.reshard`` and ``finalize_backward``). Memory of a collective may be freed once
    it has ended.
    """
    stream, shared = root._device_handle.current_stream(), root._comm_ctx
    ended = [
        getattr(shared, "all_gather_state", None),
        getattr(shared, "reduce_scatter_state", None),
    ]
    for pending in (*ended, *getattr(shared, "reduce_scatter_states", ())):
        _wait_for_event(stream, getattr(pending, "event", None))
    shared.all_gather_state = None
    if hasattr(shared, "reduce_scatter_state"):
        shared.reduce_scatter_state = None
    for events in ("reduce_scatter_states", "_last_post_reduce_events"):
        if hasattr(shared, events):
            getattr(shared, events).clear()
    shared.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            _reset_group(group, stream)
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    if (gathered := group._all_gather_result) is not None:
        _wait_for_event(stream, gathered.all_gather_event)
        if gathered.all_gather_work is not None:
            gathered.all_gather_work.wait()
        group._all_gather_result = None
    _wait_for_event(stream, group._post_reduce_event)
    _wait_for_event(stream, getattr(group._all_reduce_state, "event", None))
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()


def _wait_for_event(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)


def fsdp_state(part: Any) -> object:
    """The state of a call of ``fully_shard``: the same one for all modules of a list."""
    return part._get_fsdp_state()


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


def fsdp_gathered(part: Any) -> list[torch.Tensor]:
    """The unsharded parameters of a module of ``fully_shard``; none before its first pass."""
    gathered = [
        getattr(parameter, "_unsharded_param", None)
        for group in _fsdp_groups(part)
        for parameter in group.fsdp_params
    ]
    return [parameter for parameter in gathered if parameter is not None]


def fsdp_meshes(part: Any) -> list[Any]:
    """The DeviceMeshes over which a module of ``fully_shard`` is sharded; one, unless its
    parameters have several."""
    return [group.mesh_info.mesh for group in _fsdp_groups(part)]


def _fsdp_groups(part: Any) -> list[Any]:
    return _groups_of(part._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one, in older versions
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
