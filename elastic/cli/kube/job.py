"""The specification of a job on Kubernetes: records between `elastic kube`'s flags and its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


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
    deploy: str  # the path of deploy/, relative to the kustomization
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
