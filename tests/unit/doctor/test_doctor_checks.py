"""``elastic doctor``'s checks: from facts to a verdict, and facts in real states of a machine."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from etcd_certificates import Authority

from elastic.doctor import checks
from elastic.doctor.checks import (
    CertificateFacts,
    EtcdFacts,
    Finding,
    FolderFacts,
    GpuFacts,
    LimitFacts,
    MemberFacts,
    NetworkFacts,
    Probe,
    ShmFacts,
    Status,
    StepFacts,
    Unanswered,
    exit_code,
    not_after,
    ok,
    own_certificates,
    summary,
    warning,
)
from elastic.errors import SYSTEM_CLOCK
from elastic.tuning.network import Interface, Network
from elastic.tuning.options import AgentOptions

OK, WARNING, FAILED, SKIPPED = Status.OK, Status.WARNING, Status.FAILED, Status.SKIPPED

ETCD = EtcdFacts(
    members=(MemberFacts(endpoint="e:2379", version="3.5.9"),),
    root="/elastic/job/",
    steps=(StepFacts(name="write", error=""), StepFacts(name="read", error="")),
    read_ms=(1.0, 2.0, 3.0),
    write_ms=(4.0, 5.0, 6.0),
)
SHM = ShmFacts(size_bytes=8 << 30, free_bytes=4 << 30, error="")
LIMITS = LimitFacts(descriptors=65536, descriptors_hard=None, locked_bytes=None, rdma_devices=())
NETWORK = NetworkFacts(
    address="10.0.0.1",
    address_error="",
    host_name="node-a",
    host_addresses=("10.0.0.1",),
    interface="eth0",
    mtu=1500,
    bind_error="",
)
FOLDER = FolderFacts(
    path="/c", free_bytes=1 << 40, size_bytes=2 << 40, fsync_ms=(1.0,) * 20, error=""
)
GPU = GpuFacts(
    is_installed=True,
    has_device_files=True,
    error="",
    names=("H200",),
    driver="570.1",
    used_bytes=(1 << 30,),
    total_bytes=(140 << 30,),
    uncorrected_errors=(0,),
)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_healthy_findings_exit_with_0_despite_warnings() -> None:
    well = [
        *checks.of_etcd(ETCD),
        checks.of_shm(SHM),
        *checks.of_limits(LIMITS),
        *checks.of_network(NETWORK),
        *checks.of_folder("/c", FOLDER),
        *checks.of_gpu(GPU),
    ]
    assert {f.status for f in well} == {OK, SKIPPED}
    assert exit_code([*well, warning("MTU", "900", "raise it")]) == 0
    assert summary([ok("a", "b"), warning("MTU", "900", "raise")]) == "1 ok, 1 warning: healthy"


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("3.4.30", OK),
        ("3.5.0", WARNING),
        ("3.5.1", WARNING),
        ("3.5.2", WARNING),
        ("3.5.3", OK),
        ("3.6.1", OK),
        ("3.7.0", WARNING),
        ("what", WARNING),
    ],
)
def test_verdicts_on_etcd_versions(version: str, status: Status) -> None:
    facts = replace(ETCD, members=(MemberFacts(endpoint="e:2379", version=version),))
    assert by_name(checks.of_etcd(facts))["etcd version"].status is status


def test_one_unreachable_member_is_a_warning_and_all_of_them_a_failure() -> None:
    away = MemberFacts(endpoint="f:2379", error="connection refused", hint="start it")
    some = by_name(checks.of_etcd(replace(ETCD, members=(*ETCD.members, away))))
    assert some["etcd f:2379"].status is WARNING and some["etcd e:2379"].status is OK
    none = checks.of_etcd(EtcdFacts(members=(away,)))
    assert [f.status for f in none] == [FAILED]
    assert none[0].remedy == "start it"


@pytest.mark.parametrize(
    ("change", "name", "status", "expected_text"),
    [
        ({"alarms": ("NOSPACE",)}, "etcd alarms", FAILED, "NOSPACE"),
        ({"alarms_error": "may not"}, "etcd alarms", SKIPPED, "may not"),
        (
            {"steps": (StepFacts(name="write", error="permission denied"),)},
            "etcd permissions",
            FAILED,
            "write: permission denied",
        ),
        ({"write_ms": (150.0,) * 3}, "etcd latency", WARNING, "write 150.0 ms"),
        ({"read_ms": (1500.0,) * 3}, "etcd latency", FAILED, "read 1500.0 ms"),
        (
            {"certificates": (CertificateFacts(name="server", expires_in_s=-3600.0),)},
            "certificate",
            FAILED,
            "expired 1.0 h ago",
        ),
        (
            {"certificates": (CertificateFacts(name="server", expires_in_s=5 * 86400.0),)},
            "certificate",
            WARNING,
            "expires in 5 days",
        ),
    ],
)
def test_problems_of_etcd_are_found_with_a_remedy(
    change: dict[str, object], name: str, status: Status, expected_text: str
) -> None:
    found = by_name(checks.of_etcd(replace(ETCD, **change)))[name]  # type: ignore[arg-type]
    assert found.status is status
    assert expected_text in found.measured
    assert found.remedy or status is SKIPPED


UNANSWERED = Unanswered("no answer within 20 s")
NO_GPU = replace(GPU, is_installed=False, has_device_files=False)
WITH_RDMA = replace(LIMITS, rdma_devices=("mlx5_0",))


@pytest.mark.parametrize(
    ("facts", "statuses"),
    [
        (replace(SHM, size_bytes=64 << 20, free_bytes=64 << 20), [WARNING]),
        (replace(SHM, free_bytes=1 << 20), [FAILED]),
        (replace(SHM, error="/dev/shm: No such file or directory"), [FAILED]),
        (replace(LIMITS, descriptors=1024), [WARNING, SKIPPED]),
        (replace(LIMITS, descriptors=64), [FAILED, SKIPPED]),
        (replace(WITH_RDMA, descriptors=None), [OK, OK]),
        (replace(WITH_RDMA, locked_bytes=64 << 10), [OK, FAILED]),
        (NO_GPU, [SKIPPED]),
        (replace(GPU, is_installed=False), [WARNING]),
        (replace(GPU, error="Unable to determine the device handle", names=()), [FAILED]),
        (replace(GPU, uncorrected_errors=(3,)), [FAILED]),
        (replace(GPU, used_bytes=(100 << 30,)), [WARNING]),
        (replace(FOLDER, free_bytes=1 << 30), [WARNING, OK]),
        (replace(FOLDER, free_bytes=1 << 20), [FAILED, OK]),
        (replace(FOLDER, fsync_ms=(1.0,) * 19 + (900.0,)), [OK, WARNING]),
        (replace(FOLDER, error="Read-only file system"), [FAILED]),
    ],
)
def test_verdicts_on_a_machine(facts: Any, statuses: list[Status]) -> None:
    verdicts: dict[type, Callable[[Any], list[Finding]]] = {
        ShmFacts: lambda facts: [checks.of_shm(facts)],
        LimitFacts: checks.of_limits,
        GpuFacts: checks.of_gpu,
        FolderFacts: lambda facts: checks.of_folder("/c", facts),
    }
    assert [f.status for f in verdicts[type(facts)](facts)] == statuses


def test_a_check_without_an_answer_has_failed() -> None:
    found = [
        checks.of_shm(UNANSWERED),
        *checks.of_gpu(UNANSWERED),
        *checks.of_folder("/c", UNANSWERED),
    ]
    assert [f.status for f in found] == [FAILED] * 3


@pytest.mark.parametrize(
    ("change", "name", "status"),
    [
        ({"address_error": "--local-addr=x cannot be resolved"}, "own address", FAILED),
        ({"interface": ""}, "own address", FAILED),
        ({"host_addresses": ()}, "host name", WARNING),
        ({"host_addresses": ("127.0.1.1",)}, "host name", WARNING),
        ({"bind_error": "Address already in use"}, "ports", FAILED),
        ({"mtu": 1000}, "MTU", WARNING),
    ],
)
def test_verdicts_on_the_network(change: dict[str, object], name: str, status: Status) -> None:
    found = by_name(checks.of_network(replace(NETWORK, **change)))  # type: ignore[arg-type]
    assert found[name].status is status


def test_different_versions_on_the_nodes_are_named_with_their_nodes() -> None:
    values = {"a": "2.13.0", "b": "2.12.1", "c": "2.13.0"}
    found = checks.equal_over_nodes("equal torch", values, "use one image", fatal=True)
    assert found.status is FAILED
    assert found.measured == "2.13.0 on a, c; 2.12.1 on b"


@pytest.mark.parametrize(
    ("offset_s", "bound_s", "status"),
    [(0.5, 0.01, OK), (-3.0, 0.01, WARNING), (3.0, 2.5, OK)],
)
def test_a_clock_is_off_only_beyond_the_error_of_the_measurement(
    offset_s: float, bound_s: float, status: Status
) -> None:
    assert checks.of_clock("b", offset_s, bound_s).status is status


def test_certificates_are_read_without_being_verified(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    expired = authority.issue("expired", hours=(-2, -1))
    valid = authority.issue("valid", hours=(-1, 24 * 400))  # encoded differently after 2049
    late = authority.issue("late", hours=(-1, 24 * 365 * 30))
    options = AgentOptions(cacert=authority.cacert, cert=expired.cert, key=expired.key)
    found = {f.name.partition("=")[0]: f for f in own_certificates(options)}
    assert -3700 < found["cert"].expires_in_s < -3500
    assert 0 < found["cacert"].expires_in_s < 3700
    for pair, hours in ((valid, 24 * 400), (late, 24 * 365 * 30)):
        one = own_certificates(AgentOptions(cert=pair.cert, key=pair.key))[0]
        assert one.expires_in_s == pytest.approx(hours * 3600, abs=120)


@pytest.mark.parametrize(
    "der", [b"", b"\x30", b"\x30\x82\x01", b"nothing of the kind", b"\x30\x00"]
)
def test_an_invalid_certificate_raises_a_value_error(der: bytes) -> None:
    with pytest.raises(ValueError, match=r"certificate|time data"):
        not_after(der)


def test_a_file_without_a_certificate_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "empty.pem"
    path.write_text("nothing")
    found = checks.of_certificates(own_certificates(AgentOptions(cacert=str(path))))
    assert [f.status for f in found] == [FAILED]
    assert str(path) in found[0].measured


ETH0 = Interface(name="eth0", addresses=("10.0.0.1",), speed_mbps=1000, driver="igb")
ETH1 = Interface(name="eth1", addresses=("10.2.0.1",), speed_mbps=100_000, driver="mlx5_core")


def test_link_speeds_are_compared_with_the_interface_in_use() -> None:
    (found,) = checks.of_link_speeds(NETWORK, Network(interfaces=(ETH0, ETH1)))
    assert found.status is Status.WARNING and "eth1 100000 Mbit/s" in found.measured
    assert "--local-addr=10.2.0.1" in found.remedy
    on_fast = replace(NETWORK, address="10.2.0.1", interface="eth1")
    assert [f.status for f in checks.of_link_speeds(on_fast, Network(interfaces=(ETH0, ETH1)))] == [
        Status.OK
    ]


def test_the_speed_of_a_virtual_interface_is_ignored() -> None:
    bridge = replace(ETH1, name="docker0", driver="")
    (found,) = checks.of_link_speeds(NETWORK, Network(interfaces=(ETH0, bridge)))
    assert found.status is Status.OK
    unknown = replace(ETH0, speed_mbps=None)
    (found,) = checks.of_link_speeds(NETWORK, Network(interfaces=(unknown,)))
    assert found.status is Status.SKIPPED
    assert checks.of_link_speeds(Unanswered("hangs"), Network(interfaces=())) == []


# Real states of this machine --------------------------------------------------------------------

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
