"""The kustomization that sets sizes, image, script and store of a job. Pure: text from a record.

The scalars of the YAML are JSON strings, so that no YAML library is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from elastic.cli.kube.components import in_order
from elastic.cli.kube.job import Image, Overlay
from elastic.cli.kube.patches import INSTANCE, patches
from elastic.tuning.timeouts import for_pod

IMAGE = "torch-elastic-harness"
MARK = "# Written by `elastic kube render`; write it again instead of editing it."

_POD_LABELS = "template/metadata/labels"
_TEMPLATES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "StatefulSet": (f"spec/{_POD_LABELS}",),
        "Job": (f"spec/{_POD_LABELS}",),
        "CronJob": (f"spec/jobTemplate/spec/{_POD_LABELS}",),
        "JobSet": (f"spec/replicatedJobs/template/spec/{_POD_LABELS}",),
        "TrainingRuntime": (f"spec/template/spec/replicatedJobs/template/spec/{_POD_LABELS}",),
    }
)
_SPREAD = "topologySpreadConstraints/labelSelector/matchLabels"
# Fields by which jobs are distinguished. NetworkPolicy peers are patched: some are of other parts.
_SELECTORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "StatefulSet": ("spec/selector/matchLabels", f"spec/template/spec/{_SPREAD}"),
        "Job": (f"spec/template/spec/{_SPREAD}",),
        "JobSet": (f"spec/replicatedJobs/template/spec/template/spec/{_SPREAD}",),
        "TrainingRuntime": (
            f"spec/template/spec/replicatedJobs/template/spec/template/spec/{_SPREAD}",
        ),
        "Service": ("spec/selector",),
        "PodDisruptionBudget": ("spec/selector/matchLabels",),
        "PodMonitor": ("spec/selector/matchLabels",),
        "NetworkPolicy": ("spec/podSelector/matchLabels",),
    }
)


def kustomization(wanted: Overlay) -> str:
    """The complete file."""
    lines = [
        MARK,
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        f"namespace: {json.dumps(wanted.namespace)}",
        *([f"namePrefix: {json.dumps(f'{wanted.name}-')}"] if wanted.name else []),
        "resources:",
        f"  - {json.dumps(f'{wanted.deploy}/overlays/{wanted.overlay}')}",
        "components:",
        *(
            f"  - {json.dumps(f'{wanted.deploy}/components/{name}')}"
            for name in in_order(wanted.components, is_named=bool(wanted.name))
        ),
        *_images(wanted.image),
        *_labels(wanted),
        *_settings(wanted),
        *patches(wanted),
    ]
    return "\n".join(lines) + "\n"


def _images(image: Image | None) -> Iterator[str]:
    if image is None:
        return
    yield "images:"
    yield f"  - name: {IMAGE}"
    yield f"    newName: {json.dumps(image.name)}"
    if image.tag:
        yield f"    newTag: {json.dumps(image.tag)}"
    if image.digest:
        yield f"    digest: {json.dumps(image.digest)}"


def _labels(wanted: Overlay) -> Iterator[str]:
    if not wanted.labels and not wanted.name:
        return
    yield "labels:"
    if wanted.labels:
        yield from _pairs(wanted.labels, _TEMPLATES, create=True)
    if wanted.name:
        yield from _pairs({INSTANCE: wanted.name}, _TEMPLATES, create=True)
        yield from _pairs({INSTANCE: wanted.name}, _SELECTORS, create=False)


def _pairs(
    pairs: Mapping[str, str], places: Mapping[str, tuple[str, ...]], *, create: bool
) -> Iterator[str]:
    yield f"  - pairs: {json.dumps(dict(pairs))}"
    yield "    fields:"
    for kind, paths in places.items():
        for path in paths:
            yield f"      - {json.dumps({'kind': kind, 'path': path, 'create': create})}"


def _settings(wanted: Overlay) -> Iterator[str]:
    settings = dict(_literals(wanted))
    if not settings:
        return
    yield "configMapGenerator:"
    yield "  - name: settings"
    yield "    behavior: merge"
    yield "    literals:"
    for name, value in settings.items():
        yield f"      - {json.dumps(f'{name}={value}')}"


def _literals(wanted: Overlay) -> Iterator[tuple[str, object]]:
    if wanted.nodes is not None:
        yield "PET_NNODES", "{}:{}".format(*wanted.nodes)
    if wanted.processes is not None:
        yield "PET_NPROC_PER_NODE", wanted.processes
    if wanted.grace_s is not None:
        yield "ELASTIC_TERMINATION_GRACE_S", wanted.grace_s
        yield "PET_SHUTDOWN_TIMEOUT", int(for_pod(wanted.grace_s).shutdown_timeout_s)
    if wanted.prefix is not None:
        yield "ELASTIC_PREFIX", wanted.prefix
    if wanted.run_id is not None:
        yield "PET_RDZV_ID", wanted.run_id
    url = wanted.store.url if wanted.store else None
    if wanted.run_id is not None or url is not None:
        root = (url or "/checkpoints").rstrip("/")
        yield "ELASTIC_CHECKPOINTS", f"{root}/{wanted.run_id or 'job-1'}"
