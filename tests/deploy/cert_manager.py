"""Emulates cert-manager for our Issuers and Certificates: secrets with tls.crt and so on."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from manifests import Object, Rendered

_USES = {
    "server auth": ExtendedKeyUsageOID.SERVER_AUTH,
    "client auth": ExtendedKeyUsageOID.CLIENT_AUTH,
}


@dataclass(frozen=True)
class _Issued:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    authority: x509.Certificate


def write_secrets(manifests: Rendered, folder: Path) -> None:
    """One folder per secret, with the files that a pod mounts."""
    issued: dict[str, _Issued] = {}
    certificates = {c["spec"]["secretName"]: c["spec"] for c in manifests.of("Certificate")}
    issuers = {i["metadata"]["name"]: i["spec"] for i in manifests.of("Issuer")}

    def issue(secret: str) -> _Issued:
        if secret not in issued:
            spec = certificates[secret]
            authority = issuers[spec["issuerRef"]["name"]].get("ca")
            issued[secret] = _issue(spec, issue(authority["secretName"]) if authority else None)
        return issued[secret]

    for secret in certificates:
        one = issue(secret)
        (folder / secret).mkdir(parents=True)
        for name, pem in (
            ("tls.crt", one.certificate.public_bytes(serialization.Encoding.PEM)),
            ("ca.crt", one.authority.public_bytes(serialization.Encoding.PEM)),
            (
                "tls.key",
                one.key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                ),
            ),
        ):
            (folder / secret / name).write_bytes(pem)


def _issue(spec: Object, authority: _Issued | None) -> _Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec["commonName"])])
    now = datetime.datetime.now(datetime.timezone.utc)
    hours = int(spec["duration"].removesuffix("h"))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.certificate.subject if authority else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=hours))
        .add_extension(x509.BasicConstraints(spec.get("isCA", False), None), critical=True)
    )
    names: list[x509.GeneralName] = [x509.DNSName(n) for n in spec.get("dnsNames", [])]
    names += [x509.IPAddress(ipaddress.ip_address(a)) for a in spec.get("ipAddresses", [])]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    uses = [_USES[u] for u in spec.get("usages", []) if u in _USES]
    if uses:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    signed = builder.sign(authority.key if authority else key, hashes.SHA256())
    return _Issued(signed, key, authority.certificate if authority else signed)
