"""Permissions of pods: nothing beyond `restricted`, one token with one permission, exact images."""

from __future__ import annotations

import importlib.metadata
import re

from manifests import Object, Pod, Rendered
from pod_security import violations

ENFORCE = "pod-security.kubernetes.io/enforce"
# Required to register memory with a network card, and nothing else.
LOCKING = {"capability IPC_LOCK", "runAsNonRoot", "runAsUser 0"}
OUR_IMAGE = "torch-elastic-harness"
# A release, perhaps with a variant: never `latest`, `3` or `3.11`.
EXACT = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-\w+)?")


def test_pods_comply_with_the_restricted_profile(manifests: Rendered) -> None:
    for pod in manifests.pods():
        allowed = LOCKING if may_lock(pod, manifests) else set()
        assert violations(pod) == allowed, pod


def may_lock(pod: Pod, manifests: Rendered) -> bool:
    return "rdma" in manifests.name and pod.component == "worker"


def test_the_namespace_enforces_restricted_unless_memory_is_locked(
    manifests: Rendered,
) -> None:
    (namespace,) = manifests.of("Namespace")
    name, level = namespace["metadata"]["name"], namespace["metadata"]["labels"][ENFORCE]
    assert (level, name.endswith("-rdma")) in (("restricted", False), ("privileged", True))
    assert (level == "privileged") == ("rdma" in manifests.name)
    for one in manifests.objects:
        if one is not namespace:
            assert one["metadata"]["namespace"] == name, f"{one['kind']} in another namespace"


def test_security_fields_are_set_on_every_container(manifests: Rendered) -> None:
    for pod in manifests.pods():
        uid = 0 if may_lock(pod, manifests) else 10001
        context = pod.spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (
            uid,
            10001,
            10001,
        ), pod
        for container in pod.containers:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True, f"{pod} {container['name']}"
            assert own["seccompProfile"] == {"type": "RuntimeDefault"}
            assert {"requests", "limits"} <= set(container["resources"])
            assert "memory" in container["resources"]["limits"]


def test_workers_have_the_writable_folders_that_programs_expect(manifests: Rendered) -> None:
    mounts = {
        m["mountPath"]: m["name"] for m in manifests.workers.spec["containers"][0]["volumeMounts"]
    }
    volumes = {v["name"]: v for v in manifests.workers.spec["volumes"]}
    assert "emptyDir" in volumes[mounts["/tmp"]]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/checkpoints"]]


def test_only_one_service_account_has_a_token_and_none_is_the_default(manifests: Rendered) -> None:
    for pod in manifests.pods():
        account = manifests.one("ServiceAccount", pod.spec["serviceAccountName"])
        assert account["metadata"]["name"] != "default"
        assert account["automountServiceAccountToken"] is False
        expected = pod.component == "finisher"
        assert pod.spec["automountServiceAccountToken"] is expected, pod


def test_the_finisher_may_change_one_scale_only(manifests: Rendered) -> None:
    roles: list[Object] = [*manifests.of("Role"), *manifests.of("ClusterRole")]
    bindings = [*manifests.of("RoleBinding"), *manifests.of("ClusterRoleBinding")]
    finishers = manifests.pods("finisher")
    assert len(roles) == len(bindings) == len(finishers)
    if not finishers:
        assert not manifests.of("StatefulSet", "workers"), "nobody would ever end it"
        return
    (binding,), (finisher,) = bindings, finishers
    assert roles[0]["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [manifests.one("StatefulSet", "workers")["metadata"]["name"]],
            "verbs": ["get", "patch"],
        }
    ]
    assert binding["roleRef"]["name"] == roles[0]["metadata"]["name"]
    assert binding["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": finisher.spec["serviceAccountName"],
            "namespace": manifests.of("Namespace")[0]["metadata"]["name"],
        }
    ]


def test_images_are_pinned_to_exact_versions(manifests: Rendered) -> None:
    version = importlib.metadata.version(OUR_IMAGE)
    for pod in manifests.pods():
        for container in pod.containers:
            image = container["image"]
            assert EXACT.fullmatch(image), f"{pod}: {image}"
            name, _, tag = image.rpartition(":")
            if name == OUR_IMAGE:
                assert tag.split("-")[0] == version, image
                gpus = "nvidia.com/gpu" in container["resources"]["limits"]
                assert not gpus or tag.endswith("-cuda"), f"{pod}: GPUs, but {image}"


def test_mounted_secrets_are_not_world_readable(manifests: Rendered) -> None:
    for pod in manifests.pods():
        for volume in pod.spec.get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] & 0o007 == 0, pod
