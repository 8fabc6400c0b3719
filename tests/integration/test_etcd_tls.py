"""TLS: valid certificates are accepted, and invalid ones are refused with a clear error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from etcd_certificates import Authority, Pair
from etcd_fixtures import PATIENCE_S, Recorder

from elastic.errors import ConfigError, StoreRefused
from elastic.store.embedded import EmbeddedEtcd, EtcdCertificates
from elastic.store.etcd import EtcdStore

Connect = Callable[..., EtcdStore]


@dataclass(frozen=True)
class Site:
    """An etcd with TLS, its certificate authority, and another authority."""

    etcd: EmbeddedEtcd
    cacert: str
    client: Pair
    stranger_cacert: str
    stranger: Pair


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pki")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    server = ours.issue("server")
    certificates = EtcdCertificates(cacert=ours.cacert, cert=server.cert, key=server.key)
    with EmbeddedEtcd(certificates=certificates) as etcd:
        yield Site(etcd, ours.cacert, ours.issue("client"), theirs.cacert, theirs.issue("stranger"))


def test_valid_certificates_are_accepted(connect: Connect, site: Site) -> None:
    store = connect(
        f"https://{site.etcd.endpoint}",
        cacert=site.cacert,
        cert=site.client.cert,
        key=site.client.key,
        connect_timeout_s=PATIENCE_S,
    )
    recorder = Recorder()
    store.watch(["/a"], recorder, name="tls")
    store.put("/a", b"1", lease=store.lease(5))
    recorder.wait_for(lambda r: r.changes or (r.resets and r.resets[0].snapshot.entries))
    entry = store.get("/a")
    assert entry is not None and entry.value == b"1"


def test_a_server_certificate_of_another_authority_is_refused(connect: Connect, site: Site) -> None:
    with pytest.raises(StoreRefused, match="certificate is not signed by cacert") as caught:
        connect(
            site.etcd.endpoint,
            cacert=site.stranger_cacert,
            cert=site.client.cert,
            key=site.client.key,
            connect_timeout_s=PATIENCE_S,
        )
    assert site.etcd.endpoint in caught.value.message
    assert "cacert" in caught.value.hint


def test_a_client_certificate_of_another_authority_is_refused(connect: Connect, site: Site) -> None:
    with pytest.raises(StoreRefused, match=r"(?i)certificate"):
        connect(
            site.etcd.endpoint,
            cacert=site.cacert,
            cert=site.stranger.cert,
            key=site.stranger.key,
            connect_timeout_s=PATIENCE_S,
        )


def test_a_missing_client_certificate_is_refused(connect: Connect, site: Site) -> None:
    with pytest.raises(StoreRefused, match=r"(?i)certificate"):
        connect(site.etcd.endpoint, cacert=site.cacert, connect_timeout_s=PATIENCE_S)


def test_a_plaintext_client_of_a_tls_server_gets_a_clear_error(
    connect: Connect, site: Site
) -> None:
    with pytest.raises(StoreRefused, match="the server speaks TLS"):
        connect(site.etcd.endpoint, connect_timeout_s=PATIENCE_S)


def test_a_tls_client_of_a_plaintext_server_gets_a_clear_error(
    connect: Connect, site: Site, shared_etcd: EmbeddedEtcd
) -> None:
    with pytest.raises(StoreRefused, match="does not speak TLS"):
        connect(shared_etcd.endpoint, cacert=site.cacert, connect_timeout_s=PATIENCE_S)


def test_a_certificate_for_another_host_is_refused(connect: Connect, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    pair = authority.issue("elsewhere", address="192.0.2.1")
    certificates = EtcdCertificates(
        cacert=authority.cacert, cert=pair.cert, key=pair.key, require_client_certificate=False
    )
    with (
        EmbeddedEtcd(certificates=certificates) as etcd,
        pytest.raises(StoreRefused, match=r"certificate is not made out to 127\.0\.0\.1"),
    ):
        connect(etcd.endpoint, cacert=authority.cacert, connect_timeout_s=PATIENCE_S)


def test_an_unreadable_certificate_file_is_named(connect: Connect, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigError, match=f"cacert={missing}"):
        connect("127.0.0.1:1", cacert=str(missing))


def test_a_file_without_a_certificate_is_named(connect: Connect, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("this is no certificate")
    with pytest.raises(ConfigError, match=f"cacert={empty}"):
        connect("127.0.0.1:1", cacert=str(empty))
