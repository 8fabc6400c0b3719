"""Every setting is read by torchrun or our agents, and the settings are consistent."""

from __future__ import annotations

from argparse import Namespace
from pathlib import PurePosixPath

import pytest
from manifests import Pod, Rendered

from elastic.cli.run import build_parser, node_range
from elastic.store.client import Endpoint, parse_endpoints
from elastic.tuning.intervals import checkpoint_budget_s, leave_grace_s
from elastic.tuning.options import OTHER_VARIABLES, AgentOptions, read_options

POD_IP = "10.1.2.3"
# Values filled in by the kubelet.
POD_UID = "7c6ed9a5-0a5c-4d2b-9f0e-2f3c0d0c6b1e"
DOWNWARD = {
    "metadata.name": "workers-0",
    "metadata.uid": POD_UID,
    "status.podIP": POD_IP,
    "limits.memory": str(2**33),
}


def environment(pod: Pod, settings: dict[str, str]) -> dict[str, str]:
    """The environment of a container of this pod: the ConfigMap, then its own variables."""
    environ = dict(settings)
    for variable in pod.spec["containers"][0]["env"]:
        if "value" in variable:
            text = variable["value"]
            for name, value in environ.items():
                text = text.replace(f"$({name})", value)
            environ[variable["name"]] = text
            continue
        source = variable["valueFrom"]
        field = source.get("fieldRef", {}).get("fieldPath")
        environ[variable["name"]] = DOWNWARD[field or source["resourceFieldRef"]["resource"]]
    return environ


@pytest.fixture
def environ(manifests: Rendered) -> dict[str, str]:
    return environment(manifests.workers, manifests.settings)


@pytest.fixture
def flags(
    manifests: Rendered, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Namespace:
    """The pod's environment and arguments, parsed by torchrun's own parser."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (container,) = manifests.workers.spec["containers"]
    command, *args = container["args"]
    assert command == "run"
    return build_parser().parse_args(args)


@pytest.fixture
def options(environ: dict[str, str], flags: Namespace) -> AgentOptions:
    """The options of our agent. Raises for inconsistent intervals."""
    return read_options({}, environ)


def test_torchrun_reads_every_pet_variable(environ: dict[str, str], flags: Namespace) -> None:
    for name, value in environ.items():
        if name.startswith("PET_"):
            flag = name.removeprefix("PET_").lower()
            assert hasattr(flags, flag), f"{name} is no flag of torchrun"
            assert str(getattr(flags, flag)) == value, name


def test_our_agent_reads_every_elastic_variable(
    environ: dict[str, str], options: AgentOptions
) -> None:
    for name in environ:
        if name.startswith("ELASTIC_"):
            rest = name.removeprefix("ELASTIC_")
            assert rest in OTHER_VARIABLES or hasattr(options, rest.lower()), name


def test_no_other_variables_are_set(manifests: Rendered, environ: dict[str, str]) -> None:
    assert {n for n in environ if not n.startswith(("PET_", "ELASTIC_"))} == set()
    for pod in manifests.pods("finisher"):
        assert environment(pod, manifests.settings)["PET_RDZV_ID"] == environ["PET_RDZV_ID"]


def test_the_backend_is_ours_and_restarts_are_unlimited(flags: Namespace) -> None:
    assert flags.rdzv_backend == "etcd"
    assert flags.max_restarts > 1000
    low, high = node_range(flags.nnodes)
    assert low < high, "not elastic"


def test_options_are_derived_from_the_pod_environment(
    flags: Namespace, options: AgentOptions
) -> None:
    assert flags.local_addr == POD_IP
    assert options.pod_uid == POD_UID
    assert options.memory_limit_bytes == 2**33
    assert options.health_port == 8471


def test_a_last_checkpoint_fits_into_the_grace_period(
    manifests: Rendered, flags: Namespace, options: AgentOptions
) -> None:
    grace_s = manifests.workers.spec["terminationGracePeriodSeconds"]
    assert options.termination_grace_s == grace_s, "the agent has another grace period"
    assert flags.shutdown_timeout == options.leave_grace_s == leave_grace_s(grace_s)
    assert grace_s > flags.shutdown_timeout > checkpoint_budget_s(grace_s) >= 10


def test_each_run_has_its_own_checkpoint_folder(
    manifests: Rendered, environ: dict[str, str]
) -> None:
    folder = PurePosixPath(environ["ELASTIC_CHECKPOINTS"])
    (container,) = manifests.workers.spec["containers"]
    mounts = [m["mountPath"] for m in container["volumeMounts"]]
    assert str(folder.parent) in mounts
    assert folder.name == environ["PET_RDZV_ID"]


def test_etcd_endpoints_match_the_service_and_the_certificates(manifests: Rendered) -> None:
    endpoints = parse_endpoints(manifests.settings["PET_RDZV_ENDPOINT"])
    etcd = manifests.one("StatefulSet", "etcd")
    service = etcd["spec"]["serviceName"]
    if etcd["spec"]["replicas"] == 1:  # dev: no TLS
        assert endpoints == (Endpoint("etcd", 2379),)
        assert manifests.of("Service", "etcd")
        return
    members = [f"etcd-{i}.{service}" for i in range(etcd["spec"]["replicas"])]
    assert [e.host for e in endpoints] == members, "the loss of an unnamed member would be felt"
    assert {e.scheme for e in endpoints} == {"https"}
    for certificate in manifests.of("Certificate", "etcd-server"):
        assert {e.host for e in endpoints} <= set(certificate["spec"]["dnsNames"])


def test_certificates_are_mounted_at_the_configured_paths(manifests: Rendered) -> None:
    files = [manifests.settings.get(f"ELASTIC_{name}") for name in ("CACERT", "CERT", "KEY")]
    if manifests.one("StatefulSet", "etcd")["spec"]["replicas"] == 1:  # dev: no TLS
        assert files == [None, None, None]
        return
    for pod in (manifests.workers, *manifests.pods("finisher")):
        (container,) = pod.spec["containers"]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "etcd-client"]
        (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "etcd-client"]
        assert volume["secret"]["secretName"] == "etcd-client-tls"
        keys = ("ca.crt", "tls.crt", "tls.key")  # how cert-manager names them
        assert files == [f"{mount['mountPath']}/{key}" for key in keys]
