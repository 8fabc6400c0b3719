"""Every object is valid for API servers from 1.31 to the newest known one, strictly validated."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
from crd_schemas import SCHEMAS
from jsonschema import Draft202012Validator
from kubernetes_validate import utils
from manifests import EVERYTHING, PARTS, Object, Rendered

OLDEST = (1, 31)
VERSIONS = [
    text
    for text in dict.fromkeys(map(utils.major_minor, utils.all_versions()))  # strict or not
    if tuple(map(int, text.split("."))) >= OLDEST
]


@pytest.fixture(scope="module", autouse=True)
def read_schemas_once() -> Any:
    """The package parses its 2 MB of definitions again for each object."""
    patch = pytest.MonkeyPatch()
    patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def objects(render: Callable[[str], Rendered]) -> list[tuple[str, Object]]:
    """All rendered objects, each distinct one once; including the Jobs of custom kinds."""
    distinct: dict[str, tuple[str, Object]] = {}
    for name in (*EVERYTHING, *PARTS, "shared"):
        for whole in render(name).objects:
            for one in (whole, *jobs_inside(whole)):
                distinct.setdefault(json.dumps(one, sort_keys=True), (name, one))
    return list(distinct.values())


def jobs_inside(owner: Object) -> list[Object]:
    """The Jobs that the controller of a JobSet or TrainingRuntime would create."""
    spec = owner.get("spec", {})
    if owner["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{owner['metadata']['name']}-{job['name']}"},
            "spec": job["template"]["spec"],
        }
        for job in spec.get("replicatedJobs", [])
    ]


def test_schemas_cover_recent_kubernetes_releases() -> None:
    assert VERSIONS[0] == "1.31"
    assert len(VERSIONS) >= 6, f"kubernetes-validate knows only {VERSIONS}"


@pytest.mark.parametrize(
    "version",
    [VERSIONS[0], *(pytest.param(v, marks=pytest.mark.slow) for v in VERSIONS[1:-1]), VERSIONS[-1]],
)
def test_objects_are_valid_for(version: str, objects: list[tuple[str, Object]]) -> None:
    wrong = []
    for overlay, one in objects:
        if one["kind"] in SCHEMAS:
            continue
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            wrong.append(f"{overlay}: {one['kind']}/{one['metadata']['name']} {where}: {error}")
    assert not wrong, "\n".join(wrong)


def test_custom_resources_use_existing_fields(objects: list[tuple[str, Object]]) -> None:
    custom = [(overlay, one) for overlay, one in objects if one["kind"] in SCHEMAS]
    assert {one["kind"] for _, one in custom} == set(SCHEMAS), "a schema that nothing uses"
    wrong = [
        f"{overlay}: {one['kind']}/{one['metadata']['name']} {error.json_path}: {error.message}"
        for overlay, one in custom
        for error in Draft202012Validator(SCHEMAS[one["kind"]]).iter_errors(one)
    ]
    assert not wrong, "\n".join(wrong)
