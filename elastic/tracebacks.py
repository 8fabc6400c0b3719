"""Tracebacks as text: the frames of the user's code, the exception, and its place.

Workers shorten the traceback of the exception that ends them; agents and the leader read it.
"""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Sequence
from typing import Any

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_LIBRARIES = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    os.path.dirname(os.__file__) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)
_MAX_FRAMES = 8
_MAX_CHARS = 2000  # of the exception; shown in logs and stored in etcd


_TYPE = re.compile(r"([\w.<>]+)(?=:|$)")
_OURS = re.compile(r"(?:elastic|checkpoints)\.(?:\w+\.)*(?=\w+$)")
_MAX_MEMBERS = 8  # of an exception group
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11


def described(error: BaseException) -> str:
    """The exception's type and message; of an exception group, also those of its members.

    Types are named with their module, except for Python's and this library's: a connection error of
    an HTTP client is no lost peer, and a TrainingError of the script none of this library's. A
    message that cannot be computed is replaced, as Python does.

    >>> described(ValueError("boom")), described(KeyError())
    ('ValueError: boom', 'KeyError: ')
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  raised by the script's class; Python prints this
        text = "<exception str() failed>"
    lines = [f"{_type_name(type(error))}: {text}"]
    lines += [f"  {described(member)}" for member in members(error)[:_MAX_MEMBERS]]
    return "\n".join(lines)


def members(error: BaseException) -> Sequence[BaseException]:
    """The exceptions of an exception group."""
    return error.exceptions if isinstance(error, _GROUP) else ()


def _type_name(kind: type[BaseException]) -> str:
    if kind.__module__ == builtins.__name__:
        return kind.__qualname__
    return _OURS.sub("", f"{kind.__module__}.{kind.__qualname__}")


def with_module(message: str, trace: str) -> str:
    """A message of torch's error file, which names the type without its module, with the module
    that the traceback names; as :func:`described` writes it.

    >>> with_module("Timeout: gone", "Traceback (most recent call last):\\nhttpx.Timeout: gone")
    'httpx.Timeout: gone'
    """
    name, printed = exception_name(message), exception_name(trace)
    if not name or printed.rpartition(".")[2] != name:
        return message
    if printed == name and not hasattr(builtins, name):
        printed = f"__main__.{name}"  # Python omits this module, too
    return _OURS.sub("", printed) + message.removeprefix(name)


def shorten(formatted: str) -> str:
    """The traceback with the innermost frames of the user's code only, without source lines.

    ``formatted`` is a traceback as Python prints it, or an exception without one. Of chained
    exceptions the last one is kept, and of an exception that a data worker passed on, the original.

    >>> print(shorten('''Traceback (most recent call last):
    ...   File "train.py", line 9, in <module>
    ...     main()
    ...   File "/usr/lib/python3/site-packages/torch/nn/module.py", line 1, in forward
    ... ValueError: a label is out of range
    ... '''))
    Traceback (most recent call last):
      File "train.py", line 9, in <module>
    ValueError: a label is out of range
    """
    frames = _frames(formatted)
    own = [frame for frame in frames if not _is_of_library(frame["file"])] or frames[-1:]
    lines = [
        f'  File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}'
        for frame in own[-_MAX_FRAMES:]
    ]
    exception = _cut(_named(exception_of(formatted)))
    return "\n".join([_HEADER, *lines, exception]) if lines else exception


def _named(exception: str) -> str:
    """An exception as Python prints it, as a data worker's is, with the name that :func:`described`
    gives it.

    >>> _named("elastic.errors.ConfigError: no"), _named("httpx.Timeout: gone")
    ('ConfigError: no', 'httpx.Timeout: gone')
    """
    name = exception_name(exception)
    return _OURS.sub("", name) + exception.removeprefix(name)


def exception_of(text: str) -> str:
    """The exception with all lines of its message, without the traceback and C++ frames.

    >>> exception_of('Traceback (most recent call last):\\n  File "a", line 1, in f\\nKeyError: 3')
    'KeyError: 3'
    """
    lines = _last_section(text)
    last = max((i for i, line in enumerate(lines) if _FRAME.match(line)), default=-1)
    rest = lines[last + 1 :]
    # Source lines and their markers are indented; so are the further lines of some messages.
    begin = next((i for i, line in enumerate(rest) if line[:1].strip()), 0)
    return "\n".join(line for line in rest[begin:] if not _CPP_FRAME.match(line)).strip()


def exception_line(text: str) -> str:
    """The first line of the exception: its type and what happened.

    >>> exception_line("RuntimeError: [/gloo/tcp/pair.cc:5] Connection closed by peer [::1]:4. "
    ...                "This is typically caused by a remote worker crashing. Check the logs")
    'RuntimeError: Connection closed by peer [::1]:4'
    """
    return without_advice(exception_of(text).partition("\n")[0].strip())


def without_advice(line: str) -> str:
    """A message without the place in the source of torch and gloo, and without gloo's advice to
    read the logs of a peer that this package names."""
    return _GLOO_ADVICE.sub("", _CPP_PLACE.sub("", line))


def for_a_line(text: str) -> str:
    """An error for one line of output: without its traceback, but with the place in the user's
    code.

    >>> for_a_line('''Traceback (most recent call last):
    ...   File "/home/a/train.py", line 9, in <module>
    ... ValueError: a label is out of range
    ... ''')
    'ValueError: a label is out of range (train.py:9)'
    """
    if _HEADER not in text:
        return without_advice(text)
    place = innermost_place(shorten(text))
    return f"{exception_line(text)} ({place})" if place else exception_line(text)


def innermost_place(text: str) -> str:
    """The file's name and the line of the innermost frame of a shortened traceback; "" without one.

    The folder is left out: it may differ between nodes.
    """
    frames = _frames(text)
    return f"{os.path.basename(frames[-1]['file'])}:{frames[-1]['line']}" if frames else ""


def exception_name(text: str) -> str:
    """The name of the exception's class, with its module if the text has it; "" for a text that
    names none.

    >>> exception_name("torch.OutOfMemoryError: CUDA"), exception_name("ended by SIGABRT")
    ('torch.OutOfMemoryError', '')
    """
    name = _TYPE.match(exception_line(text))
    return name.group() if name is not None else ""


def exception_type(text: str) -> str:
    """The name of the exception's class, without its module; "" for a text that names none.

    >>> exception_type("torch.OutOfMemoryError: CUDA out of memory")
    'OutOfMemoryError'
    """
    return exception_name(text).rpartition(".")[2]


def condense(text: str, limit: int) -> str:
    """The innermost place and the beginning of the exception, within about ``limit`` characters.

    Equal tracebacks give equal results, and the result of a result is the same.
    """
    exception, frames = exception_of(text)[:limit].rstrip(), _frames(text)[-1:]
    lines = [
        f'  File "{os.path.basename(f["file"])}", line {f["line"]}, in {f["name"]}' for f in frames
    ]
    return "\n".join([_HEADER, *lines, exception]) if lines else exception


def normalize(text: str) -> str:
    """What two occurrences of one error have in common: its type, its place in the user's code,
    and its message without numbers, paths, addresses and names.

    >>> a = normalize("RuntimeError: mat1 (3x4) of rank 0, see '/tmp/a1'")
    >>> a == normalize("RuntimeError: mat1 (13x4) of rank 2, see '/tmp/b7'"), a
    (True, "RuntimeError: # (#) of rank #, see '…'")
    """
    message = exception_of(text)
    for pattern, replacement in _VARIABLE_PARTS:
        message = pattern.sub(replacement, message)
    return " ".join(f"{innermost_place(text)} {message}".split())


# In this order: a path may be quoted, and contain digits.
_VARIABLE_PARTS = (
    (re.compile(r"^\s*\[rank\s*\d+\]:?\s*", re.IGNORECASE | re.MULTILINE), ""),
    (re.compile(r"(?<!\w)(['\"`])[^'\"`\n]*\1(?!\w)"), "'…'"),
    (re.compile(r"(?<!\w)(?:\w+://|~?/|\.{1,2}/)[^\s\])>]*"), "'…'"),
    (re.compile(r"[\w.-]+(?:/[\w.-]+)+"), "'…'"),
    (re.compile(r"[\w.:-]*\d[\w:-]*(?:\+\d+)?(?:\.\w[\w:-]*)*"), "#"),
    (re.compile(r"(?<![\w.])[+-]?(?:nan|inf)(?![\w.])", re.IGNORECASE), "#"),
    (re.compile(r"#(?:(?:, *| *[x×*] *)#)+|#,(?=\))"), "#"),  # a shape
    (re.compile(r"'…'(?:, *'…')+"), "'…'"),  # a command, or a list of names
)


# "frame #0: c10::Error::Error(…) + 0xa8 (0x7f… in libc10.so)", and the line above the first one.
_CPP_FRAME = re.compile(r"\s*(frame #\d+: |Exception raised from \S+ at .*:\d+ \(most recent call)")
_CPP_PLACE = re.compile(r"\[[^\[\]\s]+\.(?:cc|cpp|h|hpp):\d+\] ")
_GLOO_ADVICE = re.compile(r"\.? This is typically caused by a remote worker .*", re.DOTALL)


def _last_section(text: str) -> list[str]:
    return text.rpartition(_HEADER)[2].splitlines()


def _frames(text: str) -> list[dict[str, str]]:
    if _HEADER not in text:
        return []
    return [match.groupdict() for line in _last_section(text) if (match := _FRAME.match(line))]


def _is_of_library(file: str) -> bool:
    return file.startswith("<frozen ") or any(part in file for part in _LIBRARIES)


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"
