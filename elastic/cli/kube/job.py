"""What a job on Kubernetes is to be: the records between `elastic kube`'s flags and its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Workload:
    """What an overlay makes of the workers."""

    kind: str
    name: str
    template: str  # the pod template, as a JSON pointer
    namespace: str
    gpus: bool = True
    image: bool = False  # whether the overlay's own image can be right: it is built on the laptop

    @property
    def finisher(self) -> bool:
        """Whether pods are scaled to 0 at the job's end. Jobs end by themselves."""
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
# Where jobs share a namespace and its etcd (deploy/overlays/shared), whatever their workload.
SHARED_NAMESPACE = "elastic-training"


@dataclass(frozen=True)
class Store:
    """Where checkpoints go: a storage class, a claim that exists, or an object store's URL."""

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
    """Of one worker's pod. ``None`` keeps the overlay's value."""

    cpu: str | None = None
    memory_bytes: int | None = None  # requested, and the limit
    storage_bytes: int | None = None  # of the claim for checkpoints


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the scheduler may put the workers."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, str], ...] = ()
    priority_class: str | None = None


@dataclass(frozen=True, kw_only=True)
class Access:
    """What pods are given to reach registries and stores."""

    pull_secrets: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_secrets: tuple[str, ...] = ()
    account_annotations: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()  # of the object store, or of a proxy, in addition to 443


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """What the user wants. ``None`` keeps the overlay's value."""

    overlay: str
    deploy: str  # the path of deploy/, relative to the kustomization
    namespace: str
    name: str | None = None  # of a job that shares namespace and etcd with others
    components: tuple[str, ...] = ()
    image: Image | None = None
    nodes: tuple[int, int] | None = None
    processes: int | None = None  # of a node: one per GPU
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
        """The prefix of a named job's keys in an etcd that it shares."""
        return f"/elastic/{self.name}" if self.name else None
