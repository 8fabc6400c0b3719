"""Findings of ``elastic doctor`` in real states of a machine, without simulation."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.doctor import checks
from elastic.doctor.checks import FolderFacts, Probe, Status, Unanswered
from elastic.errors import SYSTEM_CLOCK

PATIENCE_S = 90.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")


def facts(name: str, *arguments: object) -> Any:
    return Probe(name, arguments, deadline_s=PATIENCE_S).result()


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this root may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_good_folder_is_measured_and_left_unchanged(tmp_path: Path) -> None:
    found = facts("folder", str(tmp_path))
    assert isinstance(found, FolderFacts)
    assert len(found.fsync_ms) == 20 and found.error == ""
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_read_only_folder_fails(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    with tmpfs(folder, "ro,size=64m"):
        found = checks.of_folder(str(folder), facts("folder", str(folder)))
    assert [f.status for f in found] == [Status.FAILED]
    assert "Read-only" in found[0].measured and found[0].remedy


@needs_root
def test_a_full_folder_fails(tmp_path: Path) -> None:
    folder = tmp_path / "full"
    with tmpfs(folder, "size=64k"):
        with contextlib.suppress(OSError), (folder / "data").open("wb", 0) as file:
            while file.write(bytes(4096)):
                pass
        found = checks.of_folder(str(folder), facts("folder", str(folder)))
        assert sorted(path.name for path in folder.iterdir()) == ["data"]
    assert [f.status for f in found] == [Status.FAILED]
    assert "No space left" in found[0].measured and "free space" in found[0].remedy


def test_a_folder_that_does_not_exist_fails(tmp_path: Path) -> None:
    found = checks.of_folder("x", facts("folder", str(tmp_path / "none")))
    assert [f.status for f in found] == [Status.FAILED]
    assert "No such file" in found[0].measured


def test_a_low_descriptor_limit_fails() -> None:
    code = (
        "from elastic.doctor import checks; from elastic.doctor.checks import Probe\n"
        f"facts = Probe('limits', (), deadline_s={PATIENCE_S}).result()\n"
        "found = checks.of_limits(facts)\n"
        "print(found[0].status.value, found[0].measured)"
    )

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=lower, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "failed 100 (hard limit 100)"


def test_a_driver_that_hangs_is_killed_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvidia-smi that never returns, as with a GPU that has fallen off the bus."""
    script, started, pid = tmp_path / "nvidia-smi", tmp_path / "started", tmp_path / "pid"
    os.mkfifo(started)
    script.write_text(f"#!/bin/sh\necho $$ > {pid}\necho > {started}\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    probe = Probe("gpu", (), deadline_s=0.0)  # expired when its result is requested
    started.read_text()  # it runs now
    found = probe.result()
    assert isinstance(found, Unanswered) and "no answer within" in found.reason
    assert checks.of_gpu(found)[0].status is Status.FAILED
    ends_s = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid.read_text().strip()}").exists():
        assert SYSTEM_CLOCK.monotonic() < ends_s
        SYSTEM_CLOCK.sleep(0.01)


def test_an_address_of_another_machine_fails() -> None:
    found = checks.of_network(facts("network", "192.0.2.77", "", 0))
    assert [(f.name, f.status) for f in found] == [("own address", Status.FAILED)]
    assert "192.0.2.77" in found[0].measured and "--local-addr" in found[0].remedy


def test_a_name_that_cannot_be_resolved_fails() -> None:
    found = checks.of_network(facts("network", "no-such-host.invalid", "", 0))
    assert found[0].status is Status.FAILED and "no-such-host.invalid" in found[0].measured
    assert facts("names", "localhost", "no-such-host.invalid").unresolved == (
        "no-such-host.invalid",
    )


def test_the_facts_of_this_machine_are_plausible() -> None:
    network = facts("network", "127.0.0.1", "", 0)
    assert (network.interface, network.bind_error) == ("lo", "")
    assert network.mtu is not None and network.mtu > 1000
    assert facts("versions").torch
    shm = facts("shm")
    assert shm.error or shm.size_bytes >= shm.free_bytes > 0
