"""Exit codes: from an error to a number, and from several agents to one."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic.cli import arguments
from elastic.errors import (
    BudgetSpent,
    CheckpointRequired,
    ConfigError,
    ElasticError,
    JobFailed,
    NodeUnfit,
    Preempted,
    StoreUnreachable,
)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error as ``except`` sees it, raised from ``cause``."""
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 (handed back)
        return caught


def child_failed(*codes: int) -> ChildFailedError:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
        for rank, code in enumerate(codes)
    }
    return ChildFailedError("train.py", failures)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (StoreUnreachable("x"), 69),
        (CheckpointRequired("x"), 65),
        (BudgetSpent("x"), 70),
        (Preempted("x"), 75),
        (NodeUnfit("x"), 71),
        (JobFailed("x"), 1),
    ],
)
def test_an_elastic_error_decides_even_if_torch_wraps_it(error: ElasticError, code: int) -> None:
    assert arguments.of_agent(raised(error)) == code
    assert arguments.of_agent(raised(RendezvousConnectionError("y"), error)) == code
    deep = raised(RuntimeError("z"), raised(RendezvousConnectionError("y"), error))
    assert arguments.of_agent(deep) == code


def test_an_error_during_handling_does_not_hide_an_elastic_error() -> None:
    try:
        try:
            raise BudgetSpent("x")
        except BudgetSpent:
            raise KeyError("clean-up failed")  # noqa: B904 (the point of the test)
    except KeyError as error:
        assert arguments.of_agent(error) == 70


def test_failed_workers_exit_with_1_except_for_65() -> None:
    assert arguments.of_agent(raised(child_failed(3))) == 1
    assert arguments.of_agent(raised(child_failed(-9))) == 1
    assert arguments.of_agent(raised(child_failed(1, 65))) == 65


def test_exit_codes_and_signals_are_preserved() -> None:
    assert arguments.of_agent(SystemExit(75)) == 75
    assert arguments.of_agent(SystemExit()) == 0
    assert arguments.of_agent(SystemExit("why")) == 1
    assert arguments.of_agent(KeyboardInterrupt()) == 130
    import signal

    assert arguments.of_agent(SignalException("x", signal.SIGTERM)) == 143


def test_torchs_connection_error_is_an_unreachable_store() -> None:
    assert arguments.of_agent(RendezvousConnectionError("x")) == 69


def test_an_unexpected_exception_exits_with_1() -> None:
    assert arguments.of_agent(ZeroDivisionError()) == 1


def test_a_cyclic_exception_chain_terminates() -> None:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert arguments.of_agent(one) == 1


@pytest.mark.parametrize(
    ("codes", "ours", "expected"),
    [
        ([0, 0], True, 0),
        ([0, 0], False, 0),
        ([0, -9, 1], True, 0),  # a node was lost, the job is done
        ([0, 1], False, 1),  # otherwise one node's success is not the job's
        ([1, 70, 75], True, 70),
        ([75, 75], True, 75),
        ([1, 65], True, 65),
        ([1, 71], True, 71),
        ([69, 69], True, 69),
        ([2, 69], True, 2),
        ([-9, -9], True, 137),
        ([], True, 1),
    ],
)
def test_exit_codes_of_agents_are_combined(codes: list[int], ours: bool, expected: int) -> None:
    assert arguments.of_job(codes, success_of_one_is_enough=ours) == expected
