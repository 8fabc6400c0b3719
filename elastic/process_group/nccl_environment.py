"""Disables error handling in torch's NCCL backend: in-process recovery handles the errors.

By default ProcessGroupNCCL's watchdog ends every surviving process when a peer is gone
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``WorkNCCL::handleException``). torch itself
requires ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` if ``abort()`` is used (distributed_c10d.py,
``_abort_process_group``). If it is unset, torchrun's agent sets it to 1 in every worker
(elastic/agent/server/local_elastic_agent.py), ours to 3 (:mod:`elastic.tuning.profiles`); images
and clusters set other values, under two names.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch.distributed as dist

from elastic.errors import ConfigError
from elastic.telemetry.log import get_logger
from elastic.tuning import profiles
from elastic.tuning.worker_environment import TUNED

_MODE, _NO_HANDLING, _OF_TORCHRUN = profiles.ERROR_HANDLING, "0", "1"
# Each of these turns error handling on as well. getCvarInt (c10d/Utils.hpp) reads the old names of
# a variable, too; ProcessGroupNCCL's constructor enables error handling for "desync debug".
_OVERRIDDEN = {
    "NCCL_ASYNC_ERROR_HANDLING": "it is an old name of " + _MODE,
    "TORCH_NCCL_DESYNC_DEBUG": "it turns on " + _MODE,
    "NCCL_DESYNC_DEBUG": "it turns on " + _MODE,
}
_OFF = ("", "0", "N", "n", "NO", "no", "False", "false")


def leave_errors_to_us(environ: MutableMapping[str, str], *, is_in_process: bool) -> None:
    """Call this before a group on NCCL is created. In restart mode the user's value is kept."""
    if not is_in_process:
        environ.setdefault(_MODE, _NO_HANDLING)
        return
    tuned = environ.get(TUNED, "").split(",")
    value = environ.get(_MODE, _NO_HANDLING)
    if _MODE in tuned or value == _OF_TORCHRUN:
        get_logger().info("%s is 0 for in-process recovery; it was %s", _MODE, value)
    elif value != _NO_HANDLING:
        _say(_MODE, value, "it ends all surviving workers when a peer dies")
    environ[_MODE] = _NO_HANDLING
    for setting in profiles.in_process_settings():
        environ.setdefault(setting.name, setting.value)  # the agent has warned of unsafe values
    for name, why in _OVERRIDDEN.items():
        if (value := environ.pop(name, "0")) not in _OFF:
            _say(name, value, why)


def refuse_detail() -> None:
    """Raise ConfigError for ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, which wraps each process group.

    The wrapper (torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp) replaces the backend whose
    waits this library interrupts: workers on gloo crashed with SIGSEGV in their first step
    (torch 2.13). DETAIL also enables NCCL's error handling, which ends all survivors when a peer
    dies. It cannot be undone: torch's C++ code reads it on import.
    """
    if dist.get_debug_level().name == "DETAIL":  # type: ignore[attr-defined]
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then wraps process groups, and workers crash in "
            "their first collective, or when a peer dies",
            hint="use TORCH_DISTRIBUTED_DEBUG=INFO, or remove it; `elastic doctor` checks each "
            "collective, and the report of a hang names ranks whose collectives differ",
        )


def _say(name: str, value: str, why: str) -> None:
    get_logger().warning(
        "%s=%s is overridden for in-process recovery: %s. Remove it from the environment of this "
        "job",
        name,
        value,
        why,
    )
