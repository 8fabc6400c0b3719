"""Validation of names, labels, quantities and images. Pure: each value is checked as
the API server would check it, before anything is written.

Every function takes the flag first, and raises ConfigError with flag, value and rule. Rules:
kubernetes.io/docs/concepts/overview/working-with-objects (names, labels), apimachinery's
``resource.Quantity``, and the grammar of github.com/distribution/reference.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from elastic.errors import ConfigError

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# Names of secrets, which must not be in manifests. A file name or region has another suffix.
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CONNECTION_STRING|(TOKEN|KEY)$", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/@]*:[^/@]+@")
_KUBERNETES = ("kubernetes.io", "k8s.io")

_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)"
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?P<name>(?:(?:{_HOST}(?:\.{_HOST})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?/)?"
    rf"{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>m|[kMGTPE]|[KMGTPE]i|)")
_UNITS = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


# Names -------------------------------------------------------------------------------------------


def label_name(flag: str, name: str) -> str:
    """Check the name of a namespace or Service: a DNS-1123 label."""
    if not _LABEL.fullmatch(name):
        raise ConfigError(
            f"{flag}={name!r} is not a DNS label (RFC 1123)",
            hint="use lower-case letters, digits and '-', 63 at most, beginning and ending with a "
            "letter or digit",
        )
    return name


def subdomain(flag: str, name: str) -> str:
    """Check the name of any other object: a DNS-1123 subdomain."""
    if len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        raise ConfigError(
            f"{flag}={name!r} is not a DNS subdomain (RFC 1123)",
            hint="use lower-case letters, digits, '-' and '.', 253 at most; each part begins and "
            "ends with a letter or digit",
        )
    return name


def run_id(flag: str, name: str) -> str:
    """Check a run id: part of etcd keys and a folder name, with the rule of label values."""
    if not _QUALIFIED.fullmatch(name):
        raise ConfigError(
            f"{flag}={name!r} cannot be part of etcd keys and of a folder name",
            hint="use letters, digits, '-', '_' and '.', 63 at most, beginning and ending with a "
            "letter or digit",
        )
    return name


def image(flag: str, reference: str) -> tuple[str, str | None, str | None]:
    """An image's name, tag and digest; a digest or a tag other than `latest` is required."""
    match = _IMAGE.fullmatch(reference)
    if match is None or len(match["name"]) > 255:
        raise ConfigError(
            f"{flag}={reference!r} is not an image reference",
            hint="write [REGISTRY[:PORT]/]NAME:TAG or NAME@sha256:DIGEST; the name in lower case, "
            "its parts joined by '/', '.', '_' or '-', 255 characters at most",
        )
    if match["digest"] is None and match["tag"] in (None, "latest"):
        raise ConfigError(
            f"{flag}={reference} does not name an exact version",
            hint="write NAME:TAG with a tag that never moves, or NAME@sha256:DIGEST: a "
            "replacement pod must run what the others run",
        )
    return match["name"], match["tag"], match["digest"]


# Keys and values ---------------------------------------------------------------------------------


def label(flag: str, text: str) -> tuple[str, str]:
    """``KEY=VALUE`` of a label or a node selector."""
    key, value = _pair(flag, text)
    if value and not _QUALIFIED.fullmatch(value):
        raise ConfigError(
            f"{flag}={text}: {value!r} is not a valid label value",
            hint="use letters, digits, '-', '_' and '.', 63 at most, beginning and ending with a "
            "letter or digit",
        )
    return _key(flag, text, key), value


def annotation(flag: str, text: str) -> tuple[str, str]:
    """``KEY=VALUE`` of an annotation with any value. Refuses Kubernetes' own keys: kustomize acts
    on some of them, and omits an object with ``config.kubernetes.io/local-config``."""
    key, value = _pair(flag, text)
    _printable(flag, text)
    if is_of_kubernetes(_key(flag, text, key)):
        raise ConfigError(
            f"{flag}={text}: {key!r} is reserved for Kubernetes and its tools",
            hint="use the annotation of a cloud identity, such as eks.amazonaws.com/role-arn",
        )
    return key, value


def is_of_kubernetes(key: str) -> bool:
    """Whether the prefix of a label or annotation is reserved for Kubernetes.

    >>> is_of_kubernetes("config.kubernetes.io/local-config"), is_of_kubernetes("example.com/team")
    (True, False)
    """
    prefix = key.rpartition("/")[0]
    return any(prefix == own or prefix.endswith(f".{own}") for own in _KUBERNETES)


def variable(flag: str, text: str) -> tuple[str, str]:
    """``NAME=VALUE`` of a container's environment. Refuses values that belong in a Secret."""
    name, value = _pair(flag, text)
    _printable(flag, text)
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(
            f"{flag}={text}: {name!r} is not a valid name of an environment variable",
            hint="use letters, digits and '_', not beginning with a digit",
        )
    if name.startswith(("PET_", "ELASTIC_")):
        raise ConfigError(
            f"{flag}={name}=…: {name} is a setting of the agents",
            hint="use its own flag, or merge it into `settings` in an overlay: deploy/README.md",
        )
    if _SECRET.search(name):
        raise ConfigError(
            f"{flag}={name}=… would write a secret into the manifests",
            hint="kubectl create secret generic NAME --from-env-file=FILE, and "
            "--env-from-secret=NAME",
        )
    no_password(f"{flag}={name}", value)
    return name, value


def no_password(flag: str, url: str) -> None:
    """Raise ConfigError for ``SCHEME://USER:PASSWORD@…``, without repeating it."""
    if _PASSWORD_IN_URL.search(url):
        raise ConfigError(
            f"{flag}=… contains a password, which would be written into the manifests",
            hint="kubectl create secret generic NAME --from-env-file=FILE, and "
            "--env-from-secret=NAME",
        )


def toleration(flag: str, text: str) -> dict[str, str]:
    """``KEY[=VALUE][:EFFECT]``, as `kubectl taint` writes taints.

    >>> toleration("--toleration", "team=ml:NoSchedule")
    {'key': 'team', 'operator': 'Equal', 'value': 'ml', 'effect': 'NoSchedule'}
    >>> toleration("--toleration", "dedicated")
    {'key': 'dedicated', 'operator': 'Exists'}
    """
    taint, colon, effect = text.partition(":")
    if colon and effect not in EFFECTS:
        raise ConfigError(
            f"{flag}={text}: {effect!r} is not a taint effect",
            hint=f"write KEY[=VALUE][:EFFECT]; effects are {', '.join(EFFECTS)}",
        )
    if "=" in taint:
        key, value = label(flag, taint)
        tolerated = {"key": key, "operator": "Equal", "value": value}
    else:
        tolerated = {"key": _key(flag, text, taint), "operator": "Exists"}
    return {**tolerated, "effect": effect} if colon else tolerated


def _pair(flag: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{flag}={text} has no '='", hint=f"write {flag}=KEY=VALUE")
    return key, value


def _key(flag: str, text: str, key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    good_prefix = not slash or (len(prefix) <= 253 and _SUBDOMAIN.fullmatch(prefix))
    if not good_prefix or not _QUALIFIED.fullmatch(name):
        raise ConfigError(
            f"{flag}={text}: {key!r} is not a valid label key",
            hint="write [PREFIX/]NAME: the prefix a DNS subdomain, the name of letters, digits, "
            "'-', '_' and '.', 63 at most, beginning and ending with a letter or digit",
        )
    return key


def _printable(flag: str, text: str) -> None:
    if _UNPRINTABLE.search(text):
        raise ConfigError(f"{flag}={text!r} contains control characters", hint="remove them")


# Quantities --------------------------------------------------------------------------------------


def cpu(flag: str, text: str) -> str:
    """CPUs: more than 0, in steps of 0.001."""
    if _quantity(flag, text, "4, 1.5 or 500m") % Decimal("0.001"):
        raise ConfigError(f"{flag}={text} is finer than 1m", hint="write 4, 1.5 or 500m")
    return text


def size_bytes(flag: str, text: str) -> int:
    """Memory or storage, in bytes.

    >>> size_bytes("--memory", "1.5Gi")
    1610612736
    """
    size = _quantity(flag, text, "256Gi or 512Mi")
    # Kubernetes accepts the typo `400m` for 400M as 0.4 bytes of memory.
    if size != size.to_integral_value() or size < 2**20:
        raise ConfigError(
            f"{flag}={text} is {math.ceil(size)} bytes at most", hint="write 256Gi or 512Mi"
        )
    return int(size)


def _quantity(flag: str, text: str, examples: str) -> Decimal:
    match = _QUANTITY.fullmatch(text)
    if match is None or not (amount := Decimal(match["number"]) * _UNITS[match["unit"]]):
        raise ConfigError(
            f"{flag}={text!r} is not a positive quantity",
            hint=f"write {examples}: a number and one of "
            f"{', '.join(unit for unit in _UNITS if unit)}",
        )
    return amount
