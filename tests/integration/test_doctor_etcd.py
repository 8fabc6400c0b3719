"""``elastic doctor`` and etcd: unreachable, refusing, out of space, or with an expiring
certificate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from etcd_certificates import Authority
from etcd_fixtures import PATIENCE_S
from forked_probes import fork_probes

from elastic.cli.main import main
from elastic.doctor import checks
from elastic.doctor.checks import StepFacts
from elastic.errors import SYSTEM_CLOCK
from elastic.store.client import load_grpc, load_rpc
from elastic.store.embedded import EmbeddedEtcd, EtcdCertificates
from elastic.store.etcd import EtcdStore
from elastic.store.keyvalue import KeyValue


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long deadlines for a busy machine; one test sets its own."""
    monkeypatch.setattr(checks, "DOCTOR_ETCD_CALL_S", PATIENCE_S / 3)
    fork_probes(monkeypatch)


@dataclass
class Result:
    code: int
    findings: dict[str, dict[str, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*flags: str) -> Result:
        code = main(["doctor", "--local", "--deadline=90", "-o", "json", *flags])
        report = json.loads(capsys.readouterr().out)
        assert report["healthy"] is (code == 0)
        return Result(code, {f["name"]: f for f in report["findings"]})

    return run


def test_the_etcd_check_is_skipped_without_an_endpoint(doctor: Callable[..., Result]) -> None:
    found = doctor()
    assert found.code == 0
    assert found.findings["etcd"]["status"] == "skipped"


def test_an_unreachable_etcd_is_a_failure(doctor: Callable[..., Result]) -> None:
    found = doctor("--rdzv-endpoint=127.0.0.1:9", "--rdzv-conf=connect_timeout_s=0.5")
    assert found.code == 1
    away = found.findings["etcd 127.0.0.1:9"]
    assert away["status"] == "failed"
    assert "connection refused" in away["measured"] and "--rdzv-endpoint" in away["remedy"]


def test_the_embedded_etcd_passes_with_a_warning_and_keeps_no_data(
    doctor: Callable[..., Result],
    shared_etcd: EmbeddedEtcd,
    root: str,
    connect: Callable[..., EtcdStore],
) -> None:
    prefix = root.rstrip("/")
    found = doctor(
        f"--rdzv-endpoint={shared_etcd.endpoint},127.0.0.1:9",
        "--rdzv-id=job",
        f"--rdzv-conf=prefix={prefix},connect_timeout_s=4",
    )
    store = connect(shared_etcd.endpoint, connect_timeout_s=PATIENCE_S)
    version = store.version()
    assert found.code == 0
    assert (
        found.findings[f"etcd {shared_etcd.endpoint}"]["measured"] == f"answers, version {version}"
    )
    assert found.findings["etcd 127.0.0.1:9"]["status"] == "warning"  # one of two members
    damages = version in ("3.5.0", "3.5.1", "3.5.2")
    assert found.findings["etcd version"]["status"] == ("warning" if damages else "ok")
    assert found.findings["etcd permissions"]["status"] == "ok"
    assert f"below {root}job/" in found.findings["etcd permissions"]["measured"]
    assert found.findings["etcd alarms"]["measured"] == "none"
    assert "median of" in found.findings["etcd latency"]["measured"]
    assert store.list(root).entries == ()


@pytest.mark.slow
def test_an_etcd_that_stops_answering_does_not_hang_the_doctor(
    doctor: Callable[..., Result], own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DOCTOR_ETCD_CALL_S", 5.0)
    began = SYSTEM_CLOCK.monotonic()
    permissions = checks.permissions

    def paused(store: KeyValue, root: str) -> Iterator[StepFacts]:
        own_etcd.pause()  # every connection stays open
        return permissions(store, root)

    with monkeypatch.context() as patch:
        patch.setattr(checks, "permissions", paused)
        in_the_middle = doctor(f"--rdzv-endpoint={own_etcd.endpoint}")
    from_the_start = doctor(f"--rdzv-endpoint={own_etcd.endpoint}")
    assert SYSTEM_CLOCK.monotonic() - began < PATIENCE_S
    assert in_the_middle.code == from_the_start.code == 1
    steps = in_the_middle.findings["etcd permissions"]
    assert steps["status"] == "failed" and "within" in steps["measured"]
    member = from_the_start.findings[f"etcd {own_etcd.endpoint}"]
    assert member["status"] == "failed" and "no answer within" in member["measured"]


def test_an_etcd_alarm_is_a_failure(
    doctor: Callable[..., Result], own_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "DOCTOR_ETCD_CALL_S", 5.0)  # a write is retried until then
    rpc = load_rpc()
    with load_grpc().insecure_channel(own_etcd.endpoint) as channel:
        maintenance = rpc.MaintenanceStub(channel)
        member = maintenance.Status(rpc.StatusRequest()).header.member_id
        activate = rpc.AlarmRequest(
            action=rpc.AlarmRequest.ACTIVATE, memberID=member, alarm=rpc.NOSPACE
        )
        maintenance.Alarm(activate)
    found = doctor(f"--rdzv-endpoint={own_etcd.endpoint}")
    assert found.code == 1
    assert found.findings["etcd alarms"]["measured"] == "NOSPACE"
    assert "defragment" in found.findings["etcd alarms"]["remedy"]
    # It then refuses writes, which is the first error of an agent.
    assert found.findings["etcd permissions"]["status"] == "failed"
    assert "database space exceeded" in found.findings["etcd permissions"]["measured"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedEtcd]:
    """With users: ``worker`` (password ``bee``) may use /mine/ only."""
    with EmbeddedEtcd(name="doctor-guarded") as etcd:
        rpc = load_rpc()
        with load_grpc().insecure_channel(etcd.endpoint) as channel:
            auth = rpc.AuthStub(channel)
            auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="secret"))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
            auth.RoleAdd(rpc.AuthRoleAddRequest(name="mine"))
            grant = rpc.AuthRoleGrantPermissionRequest(name="mine")
            grant.perm.permType = 2  # READWRITE
            grant.perm.key, grant.perm.range_end = b"/mine/", b"/mine0"
            auth.RoleGrantPermission(grant)
            auth.UserAdd(rpc.AuthUserAddRequest(name="worker", password="bee"))
            auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="worker", role="mine"))
            auth.AuthEnable(rpc.AuthEnableRequest())
        yield etcd


@pytest.mark.slow
def test_logins_and_roles_are_checked(
    doctor: Callable[..., Result],
    guarded: EmbeddedEtcd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("bee\n")
    wrong.write_text("wasp\n")

    def run(password: Path, prefix: str) -> Result:
        conf = f"user=worker,password_file={password},prefix={prefix}"
        return doctor(f"--rdzv-endpoint={guarded.endpoint}", f"--rdzv-conf={conf}")

    refused = run(wrong, "/mine")
    assert refused.code == 1
    member = refused.findings[f"etcd {guarded.endpoint}"]
    assert member["status"] == "failed" and "authentication failed" in member["measured"]
    assert "password" in member["remedy"] and "wasp" not in json.dumps(refused.findings)

    assert run(right, "/mine").findings["etcd permissions"]["status"] == "ok"

    # A refused watch reports nothing.
    monkeypatch.setattr(checks, "DOCTOR_ETCD_CALL_S", 5.0)
    elsewhere = run(right, "/theirs")
    assert elsewhere.code == 1
    report = elsewhere.findings["etcd permissions"]
    assert report["status"] == "failed" and "write: " in report["measured"]
    assert "permission denied" in report["measured"] and "/theirs/" in report["remedy"]


def test_a_server_certificate_that_expires_soon_is_a_warning(
    doctor: Callable[..., Result], tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "ca")
    server, client = authority.issue("server"), authority.issue("client")
    certificates = EtcdCertificates(cacert=authority.cacert, cert=server.cert, key=server.key)
    with EmbeddedEtcd(name="doctor-tls", certificates=certificates) as etcd:
        found = doctor(
            f"--rdzv-endpoint={etcd.endpoint}",
            f"--rdzv-conf=cacert={authority.cacert},cert={client.cert},key={client.key}",
        )
        stranger = doctor(f"--rdzv-endpoint={etcd.endpoint}")
    assert found.code == 0
    assert found.findings["etcd permissions"]["status"] == "ok"
    # The last one: its own files follow the server's.
    assert found.findings["certificate"]["status"] == "warning"
    assert "expires in" in found.findings["certificate"]["measured"]
    assert stranger.code == 1
    assert "speaks TLS" in stranger.findings[f"etcd {etcd.endpoint}"]["measured"]
