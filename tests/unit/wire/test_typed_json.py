"""Typed records, converted by several threads and processes at once."""

from __future__ import annotations

import subprocess
import sys

# Evaluating the annotation of the inner record's field holds the thread that describes the outer
# one to msgspec, which has cached an incomplete description of it by then.
PROGRAM = """
from __future__ import annotations
import os, sys, threading
from dataclasses import dataclass
from elastic.wire import typed_json

describing, has_converted = threading.Event(), threading.Event()

def slowly() -> type:
    describing.set()
    has_converted.wait(0.5)
    return int

@dataclass(frozen=True)
class Inner:
    number: slowly()

@dataclass(frozen=True)
class Outer:
    inner: Inner

def convert():
    assert typed_json.convert(Outer, {"inner": {"number": 1}}) == Outer(Inner(1))

first = threading.Thread(target=convert)
first.start()
describing.wait()
if sys.argv[1] == "thread":
    convert()
    has_converted.set()
elif (pid := os.fork()) == 0:
    convert()
    os._exit(0)
else:
    assert os.waitpid(pid, 0)[1] == 0
first.join()
"""


def run(second: str) -> None:
    # In a process of its own: a fault ends it with SIGSEGV.
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, second]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_two_threads_may_be_the_first_to_convert_to_a_class() -> None:
    run("thread")


def test_a_process_forked_during_the_first_conversion_to_a_class_converts_to_it() -> None:
    run("fork")
