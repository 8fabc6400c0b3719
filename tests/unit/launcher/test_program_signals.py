"""The signals that a launch handles, and the handlers of the program that launches."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from elastic.errors import ConfigError
from elastic.launcher.launch import ProgramSignals
from elastic.launcher.torch_agent import SIGNALS_VARIABLE

USED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in USED}
    for number in USED:  # nohup and background jobs of a shell ignore some
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ours(signum: int, frame: FrameType | None) -> None:
    """The handler of a launch."""


def of_the_program(signum: int, frame: FrameType | None) -> None:
    """The handler of the program."""


def test_every_signal_on_which_torch_closes_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIGNALS_VARIABLE, "SIGTERM,SIGINT,SIGUSR1")
    before = signal.getsignal(signal.SIGHUP)
    ProgramSignals().handle(ours)
    handled = [number for number in USED if signal.getsignal(number) is ours]
    assert handled == [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    assert signal.getsignal(signal.SIGHUP) is before


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGHUP under nohup."""
    monkeypatch.delenv(SIGNALS_VARIABLE, raising=False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    of_launch = ProgramSignals()
    of_launch.handle(ours)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGQUIT) is ours
    of_launch.restore()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_the_programs_handlers_and_torchs_list_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SIGNALS_VARIABLE, raising=False)
    signal.signal(signal.SIGINT, of_the_program)
    of_launch = ProgramSignals()
    of_launch.handle(ours)
    of_launch.restore()
    assert signal.getsignal(signal.SIGINT) is of_the_program
    with pytest.raises(KeyError):
        monkeypatch.delenv(SIGNALS_VARIABLE)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (
            "SIGTERM,SIGUSR",
            "'SIGUSR' is not a signal that a process can handle, did you mean 'SIGU",
        ),
        ("SIGKILL", "'SIGKILL' is not a signal that a process can handle"),
    ],
)
def test_a_name_that_is_no_signal_is_refused(
    monkeypatch: pytest.MonkeyPatch, names: str, error: str
) -> None:
    """torchrun would omit it, and the signal would end the agent without a save."""
    monkeypatch.setenv(SIGNALS_VARIABLE, names)
    with pytest.raises(ConfigError, match=error):
        ProgramSignals()
