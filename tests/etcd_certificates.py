"""Throw-away certificates for TLS tests, made with `cryptography`."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BOTH_USES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclass(frozen=True)
class Pair:
    """PEM files of one certificate and its key."""

    cert: str
    key: str


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(name)
        usage = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._build(self._subject, self._key.public_key()).add_extension(
            usage, critical=True
        )
        signed = certificate.sign(self._key, hashes.SHA256())
        path = folder / f"{name}.pem"
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        self.cacert = str(path)

    def issue(
        self,
        name: str,
        *,
        address: str = "127.0.0.1",
        hours: tuple[float, float] = (-1, 1),
        uses: Sequence[x509.ObjectIdentifier] = BOTH_USES,
    ) -> Pair:
        """A certificate for server and client use, valid for one address, ``hours`` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = (
            self._build(_named(name), key.public_key(), hours)
            .add_extension(alternative, critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        cert_path = self._folder / f"{self._name}-{name}.pem"
        key_path = self._folder / f"{self._name}-{name}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return Pair(str(cert_path), str(key_path))

    def node_settings(self, name: str) -> dict[str, object]:
        """``--rdzv-conf`` of a node that has a certificate of this authority."""
        pair = self.issue(name)
        return {"node_cacert": self.cacert, "node_cert": pair.cert, "node_key": pair.key}

    def _build(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey,
        hours: tuple[float, float] = (-1, 1),
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(hours=hours[0]))
            .not_valid_after(now + datetime.timedelta(hours=hours[1]))
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
