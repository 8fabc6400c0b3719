"""Tracebacks as text, in the forms in which Python and torch print them."""

from __future__ import annotations

import traceback

import pytest
import torch

from elastic.tracebacks import exception_line, exception_of, innermost_place, shorten


def formatted(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except Exception:  # noqa: BLE001  of any kind
        return traceback.format_exc()
    raise AssertionError


def multiply() -> None:
    torch.nn.Linear(3, 4)(torch.zeros(2, 5))


def chained() -> None:
    try:
        multiply()
    except RuntimeError as error:
        raise ValueError("the model does not fit the data") from error


def test_only_frames_of_the_script_remain() -> None:
    text = shorten(formatted(multiply))
    files = [line for line in text.splitlines() if line.startswith("  File")]
    assert files and all(__file__ in line for line in files)
    assert exception_line(text).startswith(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )
    assert innermost_place(text).startswith("test_tracebacks.py:")
    assert shorten(text) == text


def test_of_chained_exceptions_the_last_one_is_described() -> None:
    text = shorten(formatted(chained))
    assert exception_of(text) == "ValueError: the model does not fit the data"
    assert "mat1" not in text


def test_an_exception_of_a_data_worker_is_described_by_the_original() -> None:
    original = (
        'Traceback (most recent call last):\n  File "/job/data.py", line 7, in read\n    f()\n'
    )
    text = shorten(
        "Traceback (most recent call last):\n"
        '  File "/job/train.py", line 3, in <module>\n'
        "    for x in loader:\n"
        "RuntimeError: Caught KeyError in DataLoader worker process 0.\n"
        f"Original {original}KeyError: 'label'\n"
    )
    assert exception_of(text) == "KeyError: 'label'"
    assert innermost_place(text) == "data.py:7"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("ValueError: boom", "ValueError: boom"),
        (
            "RuntimeError: CUDA error: x\nCompile with TORCH_USE_CUDA_DSA",
            "RuntimeError: CUDA error: x",
        ),
        ("ended by SIGKILL\n", "ended by SIGKILL"),
    ],
)
def test_a_text_without_a_traceback_is_the_exception(text: str, line: str) -> None:
    assert exception_line(text) == line
    assert innermost_place(text) == ""


def test_a_long_message_is_cut_in_its_middle() -> None:
    text = shorten("ValueError: " + "x" * 100_000 + " the end")
    assert len(text) < 3000 and text.startswith("ValueError: x") and text.endswith("the end")


def test_c_plus_plus_frames_are_no_part_of_a_message() -> None:
    frames = "Exception raised from f at /c10/Error.cpp:3 (most recent call first):\nframe #0: f()"
    text = f"RuntimeError: NCCL error, unhandled\nLast error: no route\n{frames}\nframe #1: g()"
    assert exception_of(text) == "RuntimeError: NCCL error, unhandled\nLast error: no route"
