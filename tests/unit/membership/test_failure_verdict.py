"""Verdicts on failures, tested with a labelled corpus of real error texts."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from kit.failure_corpus import CORPUS, SCRIPT, name_of

from elastic.membership.failures import (
    REFUSED,
    RULES,
    Action,
    FailureFacts,
    is_consequence,
    judge_failure,
)
from elastic.tracebacks import shorten

DATA_WORKER = "data-worker-killed"
DRIVER = "gpu-driver"
SEGMENT = "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode"


@pytest.mark.parametrize("example", CORPUS, ids=map(name_of, CORPUS))
def test_verdicts_match_the_labels_of_the_corpus(example: dict[str, Any]) -> None:
    assert SCRIPT.judged(example) is Action(example["label"])


def test_every_rule_has_an_example() -> None:
    used = {
        judge_failure(
            FailureFacts(
                text=e["text"],
                exit_code=e["exit_code"],
                kernel_log=tuple(e.get("kernel_log", ())),
            )
        ).rule
        for e in CORPUS
    }
    assert {rule.name for rule in RULES} <= used


def test_the_last_line_is_the_evidence() -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py"\n'
    text = trace + "NameError: name 'a' is not defined"
    verdict = judge_failure(FailureFacts(text=text, exit_code=1))
    assert verdict.evidence == "NameError: name 'a' is not defined"
    assert str(verdict) == "the script cannot run (NameError: name 'a' is not defined)"


def test_a_hardware_fault_takes_precedence_over_a_collective_error() -> None:
    text = (
        "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n"
        "torch.distributed.DistBackendError: NCCL error: remote process exited"
    )
    assert judge_failure(FailureFacts(text=text)).action is Action.EXCLUDE_NODE


def test_an_unknown_error_text_means_restart() -> None:
    verdict = judge_failure(FailureFacts(text="the moon is in the way", exit_code=3))
    assert (verdict.action, verdict.rule) == (Action.RESTART, "unknown")
    assert verdict.evidence == "the moon is in the way"
    ours = judge_failure(FailureFacts(text="the script called sys.exit(3)", exit_code=3))
    assert ours.evidence == "exit code 3"


@pytest.mark.parametrize("text", ["exit", "open: no such file", "print: a queue is full"])
def test_a_text_that_begins_with_a_name_of_python_has_a_verdict(text: str) -> None:
    """These names are of functions, and of no exceptions."""
    assert judge_failure(FailureFacts(text=text, exit_code=1)).action is Action.RESTART


def test_an_oom_kill_is_identified() -> None:
    verdict = judge_failure(FailureFacts(exit_code=-signal.SIGKILL, is_oom_kill=True))
    assert verdict.rule == "host-out-of-memory" and verdict.evidence == "SIGKILL"


def test_evidence_is_truncated() -> None:
    text = "NameError: " + "x" * 100_000
    assert len(judge_failure(FailureFacts(text=text)).evidence) == 200


HINT = "on gloo, a collective that other ranks call with another size"
OF_THE_AGENT = "local rank 1 (pid 4711) was ended by "
NO_GROUP = "ValueError: Default process group has not been initialized"


@pytest.mark.parametrize(
    ("text", "exit_code", "rule"),
    [
        # What this library writes about a worker's end.
        (f"{OF_THE_AGENT}SIGABRT", -signal.SIGABRT, "abort"),
        (f"{OF_THE_AGENT}SIGKILL", -signal.SIGKILL, "signal"),
        ("the script called sys.exit('no socket')", 1, "unknown"),
        ("the script called sys.exit(2)", 2, "wrong-usage"),
        ("hang: rank 1 hangs in data, asleep on a socket: data workers in state S", 1, "hang"),
        (f"TrainingError: the loop was left early\n  {HINT}", 1, "refused"),
        # Lines of source code in a traceback.
        (
            'Traceback (most recent call last):\n  File "/job/a.py", line 3, in connect\n'
            "    raise Timeout('nccl socket timed out')\nTimeout: gone",
            1,
            "unknown",
        ),
        # Errors of the script that contain words of the fabric.
        ("KeyError: 'socket'", 1, "unknown"),
        ("AttributeError: module 'train' has no attribute 'watchdog'", 1, "unknown"),
        ("ValueError: backend must be gloo or nccl", 1, "unknown"),
        ("AssertionError: connection refused by the configuration", 1, "unknown"),
        (NO_GROUP, 1, "unknown"),
        # Words of other rules.
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", 1, DATA_WORKER),
        ("java.lang.OutOfMemoryError: Java heap space", 1, "unknown"),
        ("RuntimeError: the tokenizer is a system not yet initialized", 1, "unknown"),
        ("RuntimeError: job 802 failed with error 802", 1, "unknown"),
        # Values that an error quotes: keys, names of files, commands, samples.
        ("KeyError: 'ModuleNotFoundError'", 1, "unknown"),
        ("KeyError: 'Xid (PCI:0): 79'", 1, "unknown"),
        ("ValueError: the sample says: uncorrectable ECC error", 1, "unknown"),
        ("AssertionError: on a read-only file system", 1, "unknown"),
        ("RuntimeError: no layer 'nccl timeout'", 1, "unknown"),
        # One common word is no failed connection.
        ("RuntimeError: the watchdog sensor of sample 12 is NaN", 1, "unknown"),
        ("RuntimeError: No backend type associated with device type cpu, use gloo", 1, "unknown"),
        ("RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", 1, DRIVER),
        ("RuntimeError: Distributed package doesn't have NCCL built in", 1, "missing-software"),
        # Connections, time limits and refusals of other libraries.
        ("requests.exceptions.ConnectionError: ('Connection aborted.', None)", 1, "service"),
        (
            "redis.ConnectionError: Error 111 connecting. Connection refused.",
            1,
            "service",
        ),
        ("httpx.ReadTimeout: timed out", 1, "service"),
        ("subprocess.TimeoutExpired: Command 'ffmpeg' timed out after 30 seconds", 1, "unknown"),
        ("wandb.errors.CommError: Run initialization has timed out", 1, "unknown"),
        ("__main__.TrainingError: the loss is NaN", 1, "unknown"),
        ("__main__.CheckpointImportError: no such format", 1, "unknown"),
        # One text, two causes.
        (f"{SEGMENT}: No space left on device (28)", 1, "shared-memory"),
        (f"{SEGMENT}: Too many open files (24)", 1, "unknown"),
    ],
)
def test_rules_read_only_what_the_program_wrote(text: str, exit_code: int, rule: str) -> None:
    assert judge_failure(FailureFacts(text=text, exit_code=exit_code)).rule == rule
    assert not is_consequence(text)


@pytest.mark.parametrize("error", ["ConfigError: not writable", "OSError: [Errno 5] Input/output"])
def test_an_error_of_another_rank_is_not_a_refusal(error: str) -> None:
    """It quotes that rank's error, which may be transient."""
    text = f"TrainingError: this rank ends because rank 0 could not restore the state ({error})"
    assert is_consequence(text)
    assert judge_failure(FailureFacts(text=text, exit_code=1)).action is Action.RESTART


def test_the_verdict_on_a_refusal_ends_with_its_hint() -> None:
    text = "ConfigError: global_batch=0\n  run.loader(…, global_batch=32)"
    verdict = judge_failure(FailureFacts(text=text, exit_code=2))
    assert verdict.action is Action.STOP
    assert str(verdict).splitlines()[-1] == "  run.loader(…, global_batch=32)"


def test_a_refusal_on_one_node_does_not_end_a_job_that_trains_on_others() -> None:
    facts = FailureFacts(text="TrainingError: too late", exit_code=1, works_elsewhere=True)
    assert judge_failure(facts).action is Action.RESTART


def test_a_refusal_that_a_data_worker_passes_on_is_one() -> None:
    text = shorten(
        "Traceback (most recent call last):\n"
        '  File "train.py", line 9, in <module>\n'
        "elastic.errors.ConfigError: Caught ConfigError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "train.py", line 6, in __getitem__\n'
        "elastic.errors.ConfigError: elastic.join() was called in a data worker\n"
        '  if __name__ == "__main__":\n'
    )
    verdict = judge_failure(FailureFacts(text=text, exit_code=2))
    assert (verdict.rule, verdict.action) == (REFUSED, Action.STOP)
    assert verdict.evidence.endswith('if __name__ == "__main__":')
