"""Forks the doctor's probes from a process with torch imported, which saves 3 s each."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.doctor import checks
from elastic.testing.forks.server import ForkedPopen, shared_fork_server


def fork_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the probes that this process starts, if forking is enabled for the tests."""
    server = shared_fork_server()
    if server is None:
        return

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return ForkedPopen(server.client, command, **options)

    names = {**vars(subprocess), "Popen": popen}
    monkeypatch.setattr(checks, "subprocess", SimpleNamespace(**names))
