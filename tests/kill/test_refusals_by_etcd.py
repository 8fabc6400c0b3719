"""``elastic run`` with an unusable etcd or invalid options: one error line and an exit code."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from training_job import PLAIN

from elastic.store.client import load_grpc, load_rpc
from elastic.store.embedded import EmbeddedEtcd, EtcdCertificates
from elastic.testing.forks.program import run_program
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S

CONNECT_TIMEOUT_S = 3.0
START_S = 25.0  # importing torch on a busy machine


@dataclass(frozen=True)
class Ended:
    """The output of a rejected run."""

    code: int
    output: str
    took_s: float


def elastic_run(
    endpoint: str, *flags: str, conf: str = "", connect_timeout_s: float = PATIENCE_S
) -> Ended:
    """Run one node: ``elastic run``, which must exit on its own."""
    settings = f"connect_timeout_s={connect_timeout_s}" + (f",{conf}" if conf else "")
    command = [
        *(sys.executable, "-m", "elastic.cli.main", "run"),
        *(f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={settings}", "--local-addr=127.0.0.1"),
        *(flags or ("--nnodes=1",)),
        str(PLAIN),
    ]
    began = time.monotonic()
    done = run_program(command, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout_s=PATIENCE_S)
    return Ended(done.returncode, done.stdout + done.stderr, time.monotonic() - began)


def assert_no_traceback(ended: Ended) -> None:
    assert "Traceback" not in ended.output, ended.output


def test_an_endpoint_without_a_listener_is_reported() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and stays reserved
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        ended = elastic_run(endpoint, connect_timeout_s=CONNECT_TIMEOUT_S)
    assert ended.code == 69, ended.output
    assert endpoint in ended.output
    assert "refused" in ended.output
    assert is_within(ended.took_s, CONNECT_TIMEOUT_S + START_S)
    assert_no_traceback(ended)


def test_an_endpoint_that_is_not_etcd_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"127.0.0.1:{mute.getsockname()[1]}"
        ended = elastic_run(endpoint, connect_timeout_s=CONNECT_TIMEOUT_S)
    assert ended.code == 69, ended.output
    assert endpoint in ended.output
    assert is_within(ended.took_s, 2 * CONNECT_TIMEOUT_S + START_S)
    assert_no_traceback(ended)


# Certificates ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Authority:
    """A certificate authority with one certificate for 127.0.0.1, server and client alike."""

    cacert: str
    cert: str
    key: str


def make_authority(folder: Path, name: str) -> Authority:
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)

    def signed(subject: x509.Name, public: ec.EllipticCurvePublicKey, is_ca: bool) -> bytes:
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                critical=False,
            )
            .sign(ca_key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    node = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} node")])
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    paths = []
    for part, content in (
        ("ca", signed(issuer, ca_key.public_key(), True)),
        ("cert", signed(node, key.public_key(), False)),
        ("key", pem),
    ):
        path = folder / f"{name}-{part}.pem"
        path.write_bytes(content)
        paths.append(str(path))
    return Authority(*paths)


def test_a_certificate_that_etcd_does_not_trust_is_reported(tmp_path: Path) -> None:
    ours, theirs = make_authority(tmp_path, "ours"), make_authority(tmp_path, "theirs")
    certificates = EtcdCertificates(cacert=theirs.cacert, cert=theirs.cert, key=theirs.key)
    with EmbeddedEtcd(certificates=certificates) as etcd:
        stranger = elastic_run(
            etcd.endpoint, conf=f"cacert={theirs.cacert},cert={ours.cert},key={ours.key}"
        )
        impostor = elastic_run(
            etcd.endpoint, conf=f"cacert={ours.cacert},cert={ours.cert},key={ours.key}"
        )
    for ended in (stranger, impostor):
        assert ended.code == 69, ended.output
        assert "certificate" in ended.output.lower()
        assert_no_traceback(ended)


# Passwords and versions ------------------------------------------------------------------------


@pytest.fixture
def etcd_with_password() -> Iterator[EmbeddedEtcd]:
    """etcd whose only user is root, with the password ``right``."""
    rpc = load_rpc()
    with EmbeddedEtcd() as etcd, load_grpc().insecure_channel(etcd.endpoint) as channel:
        auth = rpc.AuthStub(channel)
        auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="right"), timeout=PATIENCE_S)
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"), timeout=PATIENCE_S)
        auth.UserGrantRole(
            rpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=PATIENCE_S
        )
        auth.AuthEnable(rpc.AuthEnableRequest(), timeout=PATIENCE_S)
        yield etcd


def test_a_wrong_password_is_reported(etcd_with_password: EmbeddedEtcd, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("wrong\n")
    ended = elastic_run(etcd_with_password.endpoint, conf=f"user=root,password_file={password}")
    assert ended.code == 69, ended.output
    assert "password" in ended.output
    assert "wrong" not in ended.output.replace("wrong certificate", ""), "it tells the password"
    assert_no_traceback(ended)


def test_a_missing_password_is_reported(etcd_with_password: EmbeddedEtcd) -> None:
    ended = elastic_run(etcd_with_password.endpoint)
    assert ended.code == 69, ended.output
    assert "user" in ended.output
    assert_no_traceback(ended)


def test_an_etcd_before_3_4_is_reported() -> None:
    grpc, rpc = load_grpc(), load_rpc()
    status = grpc.unary_unary_rpc_method_handler(
        lambda request, context: rpc.StatusResponse(version="3.3.27", leader=1),
        request_deserializer=rpc.StatusRequest.FromString,
        response_serializer=rpc.StatusResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("etcdserverpb.Maintenance", {"Status": status})
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        ended = elastic_run(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    assert ended.code == 69, ended.output
    assert "3.3.27" in ended.output
    assert "3.4" in ended.output
    assert_no_traceback(ended)


# Options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--rdzv-id=team/job", "team/job"),
        ("--rdzv-id=a\tb", r"a\tb"),
        ("--nnodes=3:2", "3:2"),
        ("--rdzv-conf=leese_s=3", "lease_s"),
    ],
)
def test_an_invalid_option_is_a_usage_error(
    shared_etcd: EmbeddedEtcd, flag: str, names: str
) -> None:
    flags = (flag,) if flag.startswith("--nnodes") else (flag, "--nnodes=1")
    ended = elastic_run(shared_etcd.endpoint, *flags)
    assert ended.code == 2, ended.output
    assert names in ended.output
    assert_no_traceback(ended)
