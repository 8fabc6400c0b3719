"""The job, the components and the stores from which ``elastic kube`` makes manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from urllib.parse import urlsplit

from elastic.cli import kube_names
from elastic.cli.arguments import nearest
from elastic.errors import ConfigError

# ----------------------------------------------------------------------------
# ``--with``: optional components of deploy/, and combinations that have no effect. Pure.

OWN_CERTIFICATES = "own-certificates"
MONITORING = "monitoring"
KNOWN = (
    *("spot", "rdma", "kueue", "volcano", "node-tls", OWN_CERTIFICATES),
    *(MONITORING, "etcd-monitoring"),
)
# The part of a component that each of several jobs needs: they share alerts and dashboard.
_OF_NAMED = {MONITORING: f"{MONITORING}/scrape"}


def chosen(given: Sequence[str], overlay: str, name: str | None) -> tuple[str, ...]:
    """The distinct components. Raises ConfigError for an unknown, ineffective or harmful one."""
    for component in given:
        if component not in KNOWN:
            raise ConfigError(
                f"unknown component --with={component}{nearest(component, KNOWN)}",
                hint=f"known: {', '.join(KNOWN)}",
            )
    if name is not None:
        _check_named(given, name)
    if overlay == "dev":
        _check_dev(given)
    return tuple(dict.fromkeys(given))


def in_order(wanted: Sequence[str], *, is_named: bool) -> tuple[str, ...]:
    """Order components for a kustomization: certificates are removed after others add them."""
    return (
        *(
            _OF_NAMED.get(component, component) if is_named else component
            for component in wanted
            if component != OWN_CERTIFICATES
        ),
        *(["shared-etcd"] if is_named else []),
        *([OWN_CERTIFICATES] if OWN_CERTIFICATES in wanted else []),
        "derived",
    )


def _check_named(given: Sequence[str], name: str) -> None:
    if "node-tls" in given:
        raise ConfigError(
            f"--with=node-tls with --name={name}: all jobs of a namespace would have one "
            "certificate, and one would overwrite the other's",
            hint="give the job its own namespace, without --name",
        )
    if "etcd-monitoring" in given:
        raise ConfigError(
            f"--with=etcd-monitoring with --name={name}: this job has no etcd of its own",
            hint="add components/etcd-monitoring to deploy/overlays/shared",
        )


def _check_dev(given: Sequence[str]) -> None:
    lacks = {"etcd-monitoring": "whose etcd accepts only its own job"}
    if "node-tls" not in given:
        lacks[OWN_CERTIFICATES] = "which has no certificates"
    for component in given:
        if component in lacks:
            raise ConfigError(
                f"--with={component} with --overlay=dev, {lacks[component]}",
                hint="omit one of the two",
            )


# ----------------------------------------------------------------------------
# The specification of a job on Kubernetes: records between `elastic kube`'s flags and its YAML.


@dataclass(frozen=True)
class Workload:
    """The workload that an overlay creates for the workers."""

    kind: str
    name: str
    template: str  # the pod template, as a JSON pointer
    namespace: str
    gpus: bool = True
    image: bool = False  # whether the overlay's own image is usable (dev: built locally)

    @property
    def finisher(self) -> bool:
        """Whether pods are scaled to 0 at the job's end; Jobs end on their own."""
        return self.kind == "StatefulSet"


_JOBSET = "/spec/replicatedJobs/0/template/spec/template"
WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "dev": Workload(
            "StatefulSet", "workers", "/spec/template", "elastic-dev", gpus=False, image=True
        ),
        "prod": Workload("StatefulSet", "workers", "/spec/template", "elastic-training"),
        "job": Workload("Job", "workers", "/spec/template", "elastic-job"),
        "jobset": Workload("JobSet", "workers", _JOBSET, "elastic-jobset"),
        "trainer": Workload(
            "TrainingRuntime", "elastic", f"/spec/template{_JOBSET}", "elastic-trainer"
        ),
    }
)
# The namespace of jobs that share an etcd (deploy/overlays/shared), for every workload type.
SHARED_NAMESPACE = "elastic-training"


@dataclass(frozen=True)
class Store:
    """The checkpoint store: a storage class, an existing claim, or an object store's URL."""

    storage_class: str | None = None
    claim: str | None = None
    url: str | None = None


@dataclass(frozen=True, kw_only=True)
class Image:
    """A container image: at least one of tag and digest."""

    name: str
    tag: str | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of one worker pod. ``None`` keeps the overlay's value."""

    cpu: str | None = None
    memory_bytes: int | None = None  # request and limit
    storage_bytes: int | None = None  # size of the checkpoint volume claim


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Scheduling constraints of the workers."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    priority_class: str | None = None


@dataclass(frozen=True, kw_only=True)
class Access:
    """Credentials and environment with which pods reach registries and stores."""

    pull_secrets: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_secrets: tuple[str, ...] = ()
    account_annotations: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()  # of the object store or a proxy, in addition to 443


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """The requested job. ``None`` keeps the overlay's value."""

    overlay: str
    namespace: str
    name: str | None = None  # set if it shares namespace and etcd with other jobs
    components: tuple[str, ...] = ()
    image: Image | None = None
    nodes: tuple[int, int] | None = None
    processes: int | None = None  # per node: one per GPU
    run_id: str | None = None
    grace_s: int | None = None
    store: Store | None = None
    script: tuple[str, ...] = ()
    resources: Resources = Resources()
    placement: Placement = Placement()
    access: Access = Access()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.overlay]

    @property
    def prefix(self) -> str | None:
        """The key prefix of a named job in a shared etcd."""
        return f"/elastic/{self.name}" if self.name else None


# ----------------------------------------------------------------------------
# Checkpoint stores and access to them: volumes, URLs, endpoints, identities.
# Pure: flag values in, records or ConfigError out.

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
    if rest and kind in _VOLUMES and not rest.startswith("//"):
        return Store(storage_class=rest) if kind == "class" else Store(claim=rest)
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
    kube_names.no_password("--checkpoints", text)
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
