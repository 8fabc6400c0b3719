"""Validation by the API server when an object is created or changed: immutable fields.

After kubernetes/kubernetes: pkg/apis/apps/validation/validation.go (validateStatefulSetSpec,
ValidateStatefulSetUpdate), pkg/apis/batch/validation/validation.go (ValidateJobSpecUpdate,
validatePodTemplateUpdate, validateCompletions), pkg/apis/core/validation/validation.go
(ValidatePersistentVolumeClaimUpdate), apimachinery's IsValidLabelValue. A Job's pod template is
immutable: the exceptions (scheduling directives, resources) apply to suspended Jobs that have not
started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from manifests import Object

_MUTABLE_OF_STATEFULSETS = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
)
_IMMUTABLE_OF_JOBS = (
    "selector",
    "template",
    "completionMode",
    "podFailurePolicy",
    "backoffLimitPerIndex",
    "managedBy",
    "successPolicy",
)
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")


def creation_errors(new: Object) -> list[str]:
    """Errors for a new object."""
    spec = new.get("spec", {})
    template = spec.get("template", {}) if isinstance(spec, dict) else {}
    labels: Mapping[str, object] = template.get("metadata", {}).get("labels", {})
    errors = [
        f"spec.template.metadata.labels: Invalid value: {value!r}"
        for value in labels.values()
        if not (isinstance(value, str) and _LABEL.fullmatch(value))
    ]
    if new["kind"] == "StatefulSet" and not (
        spec["selector"]["matchLabels"].items() <= labels.items()
    ):
        errors.append("spec.template.metadata.labels: `selector` does not match template `labels`")
    return errors


def update_errors(old: Object, new: Object) -> list[str]:
    """Errors for an update of an existing object. Empty: accepted."""
    errors = creation_errors(new)
    before, after = old.get("spec", {}), new.get("spec", {})
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    if new["kind"] == "StatefulSet" and changed - {*_MUTABLE_OF_STATEFULSETS}:
        fields = ", ".join(f"'{name}'" for name in _MUTABLE_OF_STATEFULSETS)
        errors.append(
            f"spec: Forbidden: updates to statefulset spec for fields other than {fields} "
            "are forbidden"
        )
    if new["kind"] == "Job":
        errors += [
            f"spec.{name}: Invalid value: field is immutable"
            for name in _IMMUTABLE_OF_JOBS
            if name in changed
        ]
        elastic = after.get("completionMode") == "Indexed" and (
            after.get("completions") == after.get("parallelism")
        )
        if "completions" in changed and not elastic:
            errors.append("spec.completions: Invalid value: field is immutable")
    if new["kind"] == "PersistentVolumeClaim" and changed - {"resources"}:
        errors.append("spec: Forbidden: spec is immutable after creation except resources.requests")
    return errors
