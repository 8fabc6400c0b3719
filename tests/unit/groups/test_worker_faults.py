"""Which errors are faults of the world: by type, by the origin of the text, and by cause."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from elastic.errors import ConfigError, GroupAborted, GroupBuildFailed, Superseded, TrainingError
from elastic.groups.faults import ControlFlow, causes, is_world_fault

# As raised by torch 2.13 on ranks whose peer was killed, stopped, or late.
CLOSED = RuntimeError(
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by "
    "peer [127.0.0.1]:41777. This is typically caused by a remote worker crashing."
)
RESET = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:36263: "
    "Connection reset by peer."
)
LATE = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "1000ms for recv operation to complete"
)
ASSERTION = RuntimeError(
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] "
    "op.preamble.length <= op.nbytes. 8 vs 4"
)
DEVICE = RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    "error",
    [
        CLOSED,
        RESET,
        LATE,
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        dist.DistNetworkError("Failed to recv, got 0 bytes"),
        dist.DistStoreError("wait timeout after 100ms, keys: /a"),
        Superseded("generation 3 is over"),
        GroupBuildFailed("ranks [1] did not come", missing=(1,)),
        GroupAborted("the group was taken down"),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[-40:],
)
def test_lost_peers_are_faults(error: Exception) -> None:
    assert is_world_fault(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"),
        RuntimeError("Timed out waiting for the feature service"),
        RuntimeError("Broken pipe"),
        BrokenPipeError("Broken pipe"),
        ConnectionResetError("Connection reset by peer"),
        TimeoutError("Timed out waiting"),
        ValueError("Connection closed by peer"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ASSERTION,
        DEVICE,
        dist.DistBackendError("NCCL error: CUDA error: device-side assert triggered"),
        ConfigError("--nproc"),
        TrainingError("LBFGS"),
        SignalException("got SIGTERM", sigval=15),  # type: ignore[arg-type]
        KeyboardInterrupt(),
        SystemExit(1),
    ],
    ids=lambda error: f"{type(error).__name__}: {error}"[-40:],
)
def test_errors_of_the_script_are_not_faults(error: BaseException) -> None:
    assert not is_world_fault(error)


def raised(error: BaseException, *, cause: BaseException) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001
        return caught


def raised_while_handling(error: BaseException, *, handled: BaseException) -> BaseException:
    try:
        try:
            raise handled
        except BaseException:  # noqa: BLE001
            raise error  # noqa: B904
    except BaseException as caught:  # noqa: BLE001
        return caught


def test_a_fault_wrapped_by_user_code_is_a_fault() -> None:
    assert is_world_fault(raised(ValueError("the step failed"), cause=CLOSED))
    assert is_world_fault(raised_while_handling(ValueError("cleanup"), handled=CLOSED))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups")
def test_a_fault_in_a_group_is_a_fault() -> None:
    """asyncio.TaskGroup wraps the errors of its tasks."""
    group = vars(builtins)["ExceptionGroup"]
    assert is_world_fault(group("tasks", [ValueError("cancelled"), group("inner", [CLOSED])]))
    assert not is_world_fault(group("tasks", [ValueError("a bad sample")]))


def test_a_fault_raised_while_handling_an_error_is_a_fault() -> None:
    assert is_world_fault(raised_while_handling(GroupAborted("gone"), handled=KeyError("cache")))


@pytest.mark.parametrize(
    "first", [torch.OutOfMemoryError("CUDA out of memory"), DEVICE, KeyboardInterrupt()]
)
def test_an_abort_in_a_finally_block_does_not_hide_the_first_error(
    first: BaseException,
) -> None:
    assert not is_world_fault(raised_while_handling(GroupAborted("gone"), handled=first))


def test_a_signal_during_the_handling_of_a_fault_is_not_a_fault() -> None:
    signal = SignalException("got SIGTERM", sigval=15)  # type: ignore[arg-type]
    assert not is_world_fault(raised_while_handling(signal, handled=CLOSED))


def test_a_cause_suppressed_with_from_none_is_ignored() -> None:
    error = raised_while_handling(ValueError("bad sample"), handled=CLOSED)
    error.__suppress_context__ = True
    assert not is_world_fault(error)


def test_a_cycle_of_causes_terminates() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert causes(first) == [first, second]
    assert not is_world_fault(first)


def test_the_end_of_a_function_is_no_cause_of_a_later_fault() -> None:
    """A function that ends because others have returned meets them afterwards."""
    with pytest.raises(RuntimeError) as raised:
        try:
            raise ControlFlow
        except ControlFlow:
            raise RuntimeError(str(CLOSED))  # noqa: B904  as in __exit__ of an attempt
    assert isinstance(raised.value.__context__, ControlFlow)
    assert is_world_fault(raised.value)
