"""Forks the doctor's ranks and probes from a process with torch imported, which saves 3 s each."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.doctor import checks, collectives
from elastic.testing.forks.server import ForkedPopen, shared_fork_server


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks and probes that this process starts, if forking is enabled for the tests."""
    server = shared_fork_server()
    if server is None:
        return

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return ForkedPopen(server.client, command, **options)

    names = {**vars(subprocess), "Popen": popen}
    for module in (collectives, checks):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**names))
