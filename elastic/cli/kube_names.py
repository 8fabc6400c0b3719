"""Values of flags that the API server would accept although they are wrong, and those that are
computed with. Pure.

The API server judges names, labels, taints and images when manifests are applied. Every function
takes the flag first, and raises ConfigError with flag, value and rule.
"""

from __future__ import annotations

import re
from decimal import Decimal

from elastic.errors import ConfigError

_QUALIFIED = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
# Names of secrets, which must not be in manifests. A file name or region has another suffix.
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CONNECTION_STRING|(TOKEN|KEY)$", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/@]*:[^/@]+@")
_KUBERNETES = ("kubernetes.io", "k8s.io")

_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>m|[kMGTPE]|[KMGTPE]i|)")
_UNITS = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", start=1)},
}


# Names -------------------------------------------------------------------------------------------


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
    """An image's name, tag and digest; a digest or a tag other than `latest` is required.

    >>> image("--image", "localhost:5000/train:1.4@sha256:2f1d")
    ('localhost:5000/train', '1.4', 'sha256:2f1d')
    """
    named, _, digest = reference.partition("@")
    name, tag = named, ""
    if ":" in named.rpartition("/")[2]:  # not the registry's port
        name, _, tag = named.rpartition(":")
    if not digest and tag in ("", "latest"):
        raise ConfigError(
            f"{flag}={reference} does not name an exact version",
            hint="write NAME:TAG with a tag that never moves, or NAME@sha256:DIGEST: a "
            "replacement pod must run what the others run",
        )
    return name, tag or None, digest or None


# Keys and values ---------------------------------------------------------------------------------


def pair(flag: str, text: str) -> tuple[str, str]:
    """``KEY=VALUE``, as of a label or a node selector."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{flag}={text} has no '='", hint=f"write {flag}=KEY=VALUE")
    return key, value


def annotation(flag: str, text: str) -> tuple[str, str]:
    """``KEY=VALUE`` of an annotation with any value. Refuses Kubernetes' own keys: kustomize acts
    on some of them, and omits an object with ``config.kubernetes.io/local-config``."""
    key, value = pair(flag, text)
    if is_of_kubernetes(key):
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
    name, value = pair(flag, text)
    if name.startswith(("PET_", "ELASTIC_")):
        raise ConfigError(
            f"{flag}={name}=…: {name} is a setting of the agents",
            hint="use its own flag, or merge it into `settings` in a kustomization (--output-dir "
            "writes one)",
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


def toleration(text: str) -> dict[str, str]:
    """``KEY[=VALUE][:EFFECT]``, as `kubectl taint` writes taints.

    >>> toleration("team=ml:NoSchedule")
    {'key': 'team', 'operator': 'Equal', 'value': 'ml', 'effect': 'NoSchedule'}
    >>> toleration("dedicated")
    {'key': 'dedicated', 'operator': 'Exists'}
    """
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    tolerated = {"key": key, "operator": "Equal" if equals else "Exists"}
    return tolerated | ({"value": value} if equals else {}) | ({"effect": effect} if colon else {})


# Quantities --------------------------------------------------------------------------------------


def size_bytes(flag: str, text: str) -> int:
    """Memory or storage, in bytes.

    >>> size_bytes("--memory", "1.5Gi")
    1610612736
    """
    match = _QUANTITY.fullmatch(text)
    size = Decimal(match["number"]) * _UNITS[match["unit"]] if match is not None else Decimal(0)
    # Kubernetes accepts the typo `400m` for 400M as 0.4 bytes of memory.
    if size != size.to_integral_value() or size < 2**20:
        raise ConfigError(
            f"{flag}={text} is no size, or less than 1Mi",
            hint="write 256Gi or 512Mi: a number and one of "
            f"{', '.join(unit for unit in _UNITS if unit)}",
        )
    return int(size)
