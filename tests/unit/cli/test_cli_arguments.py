"""What commands have in common: flags that name a job and its etcd, and exit codes."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic.cli import arguments, doctor, env, finish
from elastic.cli.arguments import add_job_arguments, endpoint_of, options_of, run_id_of
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

ENVIRON = {
    "PET_RDZV_ENDPOINT": "etcd:2379",
    "PET_RDZV_ID": "job-1",
    "PET_RDZV_CONF": "prefix=/ours,mode=restart",
}
ParserOf = Callable[[Mapping[str, str]], argparse.ArgumentParser]


def parsed(*flags: str, environ: Mapping[str, str] = ENVIRON) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_job_arguments(parser, environ)
    return parser.parse_args(flags)


def test_the_defaults_are_torchruns_variables() -> None:
    args = parsed()
    assert (endpoint_of(args), run_id_of(args)) == ("etcd:2379", "job-1")
    options = options_of(args, {})
    assert (options.prefix, options.mode) == ("/ours", "restart")


def test_a_flag_takes_precedence_over_its_variable() -> None:
    args = parsed(
        "--rdzv-endpoint=other:1", "--rdzv-id=j", "--rdzv-conf= user = u , password_file=p,"
    )
    assert (endpoint_of(args), run_id_of(args)) == ("other:1", "j")
    assert options_of(args, {"ELASTIC_PREFIX": "/theirs"}).prefix == "/theirs"
    assert options_of(args, {}).user == "u"


def test_missing_and_malformed_values_name_the_flag_and_the_variable() -> None:
    nothing = parsed(environ={})
    with pytest.raises(ConfigError, match="neither --rdzv-endpoint nor PET_RDZV_ENDPOINT"):
        endpoint_of(nothing)
    with pytest.raises(
        ConfigError,
        match="neither --rdzv-id nor PET_RDZV_ID is given, and no job has run on this machine",
    ):
        run_id_of(nothing)
    assert options_of(nothing, {}).prefix == options_of(parsed("--rdzv-conf=,"), {}).prefix
    for text in ("prefix", "prefix=", "=/ours"):
        with pytest.raises(ConfigError, match=r"^--rdzv-conf=.* is not KEY=VALUE"):
            options_of(parsed(f"--rdzv-conf={text}"), ENVIRON)
        wrong = {"PET_RDZV_CONF": text}
        with pytest.raises(ConfigError, match=r"^PET_RDZV_CONF=.* is not KEY=VALUE"):
            options_of(parsed(environ=wrong), wrong)


@pytest.mark.parametrize(
    ("parser", "flags"),
    [(doctor.parser, []), (finish.parser, ["--statefulset=workers"]), (env.parser, [])],
)
def test_every_command_reads_the_same_variables(parser: ParserOf, flags: list[str]) -> None:
    args = parser(ENVIRON).parse_args(flags)
    assert options_of(args, {}).prefix == "/ours"
    if parser is not env.parser:
        assert (endpoint_of(args), run_id_of(args)) == ("etcd:2379", "job-1")


# Exit codes: from an error to a number, and from several agents to one ----------------------------


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error as ``except`` sees it, raised from ``cause``."""
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 (handed back)
        return caught


def child_failed(*codes: int, error_file: str = "<N/A>") -> ChildFailedError:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=error_file)
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


@pytest.mark.parametrize(
    ("text", "worker", "agent"),
    [
        (None, 3, 1),
        (None, -9, 1),
        (None, 65, 1),
        ("SystemExit: 65", 65, 1),
        ("ValueError: no CheckpointRequired", 65, 1),
        ("CheckpointRequired: none is complete", 65, 65),
        ("elastic.errors.CheckpointRequired: none is complete", 65, 65),
    ],
)
def test_failed_workers_exit_with_1_unless_this_library_requires_a_checkpoint(
    tmp_path: Path, text: str | None, worker: int, agent: int
) -> None:
    file = tmp_path / "error.json"
    if text is not None:
        written = {"message": text, "extraInfo": {"timestamp": "1", "py_callstack": ""}}
        file.write_text(json.dumps({"message": written}))
    failed = child_failed(1, worker, error_file=str(file))
    assert arguments.of_agent(raised(failed)) == agent


def test_exit_codes_and_signals_are_preserved() -> None:
    assert arguments.of_agent(SystemExit(75)) == 75
    assert arguments.of_agent(SystemExit()) == 0
    assert arguments.of_agent(SystemExit("why")) == 1
    assert arguments.of_agent(KeyboardInterrupt()) == 130
    assert arguments.of_agent(ZeroDivisionError()) == 1
    assert arguments.of_agent(RendezvousConnectionError("x")) == 69
    assert arguments.of_agent(SignalException("x", signal.SIGTERM)) == 143


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
