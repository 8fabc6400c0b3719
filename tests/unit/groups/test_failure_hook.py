"""What a worker reports of the exception that ends it, whoever handles it."""

from __future__ import annotations

import builtins
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastic.errors import CheckpointRequired
from elastic.groups.faults import FailureHook
from elastic.membership.failures import REFUSED, Action, FailureFacts, judge_failure


class Process:
    """A process with a hook; records what the hook reports, and what others print."""

    def __init__(self, error_file: Path) -> None:
        self.reported: list[tuple[str, int]] = []
        self.printed: list[str] = []
        self.error_file = error_file
        sys.excepthook = self.printing("python")
        self.hook = FailureHook(notify=lambda text, code: self.reported.append((text, code)))
        self.hook.install()

    def printing(self, name: str) -> Callable[..., None]:
        return lambda kind, error, trace: self.printed.append(f"{name}: {error}")

    def recorded(self) -> str | None:
        if not self.error_file.exists():
            return None
        return str(json.loads(self.error_file.read_text())["message"]["message"])


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return Process(tmp_path / "error.json")


def raised(error: BaseException) -> BaseException:
    def train() -> None:
        raise error

    try:
        train()
    except BaseException as caught:  # noqa: BLE001  of any kind
        return caught
    raise AssertionError


def fail(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def test_an_uncaught_exception_is_reported_with_its_place_and_exit_code(process: Process) -> None:
    fail(raised(CheckpointRequired("none", hint="set a folder")))
    ((text, code),) = process.reported
    header, *frames, exception, hint = text.splitlines()
    assert header == "Traceback (most recent call last):"
    assert frames[-1].endswith("in train") and __file__ in frames[-1]
    assert (exception, hint) == ("CheckpointRequired: none", "  set a folder")
    assert code == CheckpointRequired.exit_code
    assert process.printed == ["python: none\n  set a folder"]


def test_a_hook_installed_later_does_not_hide_an_exception(process: Process) -> None:
    """As rich.traceback.install() and Typer do: they replace the hook, and do not call it."""
    sys.excepthook = process.printing("rich")
    error = raised(ValueError("boom"))
    process.hook.end_training(error)
    assert process.reported == [], "the script may handle it"
    fail(error)
    assert [text.splitlines()[-1] for text, _ in process.reported] == ["ValueError: boom"]
    assert process.printed == ["rich: boom"]


def test_a_hook_around_ours_is_called_and_reports_nothing_twice(process: Process) -> None:
    """As init_process_group() installs one, to prefix the rank."""
    inner = sys.excepthook

    def around(*of: object) -> None:
        process.printed.append("around")
        inner(*of)  # type: ignore[arg-type]

    sys.excepthook = around
    error = raised(ValueError("boom"))
    process.hook.end_training(error)
    fail(error)
    assert process.printed == ["around", "python: boom"]
    assert len(process.reported) == 1


def test_an_exception_that_the_script_handles_is_recorded_until_it_trains_again(
    process: Process,
) -> None:
    """Hydra handles it and exits; a search for hyperparameters begins the next trial."""
    process.hook.end_training(raised(ValueError("of the first trial")))
    assert process.recorded() == process.hook.text == "ValueError: of the first trial"
    process.hook.begin_training()
    assert process.recorded() is None and process.hook.text == process.hook.report == ""
    process.hook.end_training(raised(ValueError("of the second trial")))
    fail(raised(KeyError("of the report")))
    assert process.recorded() == "KeyError: 'of the report'"
    assert [text.splitlines()[-1] for text, _ in process.reported] == ["KeyError: 'of the report'"]


@pytest.mark.parametrize(
    ("code", "exit_code"), [(3, 3), ("a message", 1), (256 + 7, 7), (0, None), (None, None)]
)
def test_sys_exit_is_reported_where_it_leaves_the_training_function(
    process: Process, code: int | str | None, exit_code: int | None
) -> None:
    process.hook.end_training(raised(SystemExit(code)))
    assert [c for _, c in process.reported] == ([] if exit_code is None else [exit_code])
    assert process.hook.failed is (exit_code is not None)
    for text, _ in process.reported:
        assert text.splitlines()[-1] == f"the script called sys.exit({code!r})"


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("text")


class TrainingError(Exception):
    """Of the script; this library has one, too."""


def test_an_exception_without_a_printable_message_is_reported(process: Process) -> None:
    error, text = raised(Mute()), f"{__name__}.Mute: <exception str() failed>"
    process.hook.end_training(error)
    assert process.recorded() == f"RuntimeError: {text}"
    with contextlib.suppress(AttributeError):  # the other hook prints the message
        fail(error)
    assert [(reported.splitlines()[-1], code) for reported, code in process.reported] == [(text, 1)]


def test_errors_of_the_script_are_told_from_this_librarys(process: Process) -> None:
    fail(raised(TrainingError("of the script")))
    assert process.reported[0][0].splitlines()[-1] == f"{__name__}.TrainingError: of the script"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups")
def test_the_members_of_a_group_are_reported(process: Process) -> None:
    group = vars(builtins)["ExceptionGroup"]("several", [ValueError("a bad sample"), OSError("b")])
    fail(raised(group))
    assert process.reported[0][0].splitlines()[-3:] == [
        "ExceptionGroup: several (2 sub-exceptions)",
        "  ValueError: a bad sample",
        "  OSError: b",
    ]


def test_reporting_an_exception_leaves_its_traceback_as_it_was(process: Process) -> None:
    error = raised(ValueError("boom"))
    trace = error.__traceback__
    fail(error)
    assert error.__traceback__ is trace


def test_a_missing_process_group_is_a_refusal_with_the_remedy(process: Process) -> None:
    """`dist.get_rank()` at the top of a script: every start would fail in the same way."""
    with pytest.raises(ValueError, match="not been initialized") as missing:
        torch.distributed.get_rank()
    fail(missing.value)
    ((text, code),) = process.reported
    verdict = judge_failure(FailureFacts(text=text, exit_code=code))
    assert (verdict.action, verdict.rule) == (Action.STOP, REFUSED)
    assert "not been initialized" in str(verdict) and "make sure to call" not in str(verdict)
    assert str(verdict).splitlines()[-1].lstrip().startswith("run.world.rank, run.world.size")
    assert (process.recorded() or "").endswith("inside the training function")
