"""Checkpoint stores and access to them: volumes, URLs, endpoints, identities.
Pure: flag values in, records or ConfigError out."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from elastic.cli.kube import names
from elastic.cli.kube.job import Access, Store
from elastic.errors import ConfigError

# Variables that may name a store or proxy on another port than 443.
_ENDPOINTS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "FSSPEC_S3_ENDPOINT_URL",
    "HTTPS_PROXY",
    "HTTP_PROXY",
)
_PORTS = {"http": 80, "https": 443}
_VOLUMES = ("class", "claim")
# Schemes for a pod's own file system, or read-only ones.
_NO_STORES = frozenset({"file", "local", "memory", "http", "https"})
_GOOGLE = frozenset({"gs", "gcs"})
# Azure's webhook reads the annotation only on the service accounts of pods with this label.
_AZURE_IDENTITY = "azure.workload.identity/client-id"
_AZURE_LABEL = ("azure.workload.identity/use", "true")


def store(text: str) -> Store:
    """Parse ``--checkpoints``. Raises ConfigError."""
    kind, colon, rest = text.partition(":")
    if colon and kind in _VOLUMES and not rest.startswith("//"):
        name = names.subdomain(f"--checkpoints={kind}", rest)
        return Store(storage_class=name) if kind == "class" else Store(claim=name)
    if colon and kind not in _VOLUMES and rest.startswith("//"):
        return Store(url=_url(text))
    raise ConfigError(
        f"--checkpoints={text} is not a store",
        hint="class:NAME, claim:NAME, or a URL like s3://bucket/prefix",
    )


def components(wanted: Store | None, access: Access) -> tuple[str, ...]:
    """The components of deploy/ that let the workers reach the store."""
    if wanted is None or wanted.url is None:
        return ()
    google = urlsplit(wanted.url).scheme in _GOOGLE and not access.environment_secrets
    return ("object-store", "gke-identity") if google else ("object-store",)


def ports(environment: Mapping[str, str]) -> set[int]:
    """The ports of the endpoints and proxies in the workers' environment. Raises ConfigError."""
    return {
        _port(name, environment[name])
        for name in (*_ENDPOINTS, *map(str.lower, _ENDPOINTS))
        if name in environment
    }


def check_identity(annotations: Mapping[str, str], labels: Mapping[str, str]) -> None:
    """Raise ConfigError for an annotation that has no effect without a label."""
    label, value = _AZURE_LABEL
    if _AZURE_IDENTITY in annotations and labels.get(label) != value:
        raise ConfigError(
            f"--service-account-annotation={_AZURE_IDENTITY}=… without the label that makes Azure "
            "read it",
            hint=f"add --label={label}={value}",
        )


def _url(text: str) -> str:
    scheme, _, path = text.partition("://")
    if scheme.lower() in _NO_STORES:
        raise ConfigError(
            f"--checkpoints={text}: {scheme} is not a store that all nodes can write to",
            hint="use s3://bucket/prefix, or a volume with class:NAME or claim:NAME",
        )
    bucket, *folders = path.rstrip("/").split("/")
    wrong = not scheme.isalnum() or not bucket or not {"", ".", ".."}.isdisjoint(folders)
    if wrong or scheme != scheme.lower() or not text.isprintable() or set(text) & set(" ?#\\"):
        raise ConfigError(
            f"--checkpoints={text!r} is not the URL of a folder in an object store",
            hint="write SCHEME://BUCKET/PREFIX, the scheme in lower case, without '..', spaces, "
            "'?' and '#'",
        )
    names.no_password("--checkpoints", text)
    return text


def _port(name: str, url: str) -> int:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        port = None
    if port is None or not parts.hostname or parts.scheme not in _PORTS:
        raise ConfigError(
            f"--env={name}={url} is not the URL of an endpoint",
            hint="write http://HOST:PORT or https://HOST[:PORT]",
        )
    return port
