"""The `restricted` profile of the Pod Security Standards, as published for Kubernetes 1.36."""

from __future__ import annotations

from collections.abc import Iterator

from manifests import Object, Pod

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(pod: Pod) -> set[str]:
    """The violations of `restricted` by this pod."""
    return {*_of_pod(pod.spec), *(v for c in pod.containers for v in _of_container(pod.spec, c))}


def _of_pod(spec: Object) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {kinds}"
    if spec.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _of_container(spec: Object, container: Object) -> Iterator[str]:
    own = container.get("securityContext", {})
    merged = {**spec.get("securityContext", {}), **own}
    capabilities = own.get("capabilities", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if capabilities.get("drop") != ["ALL"]:
        yield "capabilities.drop"
    for added in set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"capability {added}"
    if merged.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if merged.get("runAsUser") == 0:
        yield "runAsUser 0"
    if merged.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "hostPort"
