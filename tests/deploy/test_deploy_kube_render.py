"""``elastic kube render``: every flag has its documented effect; invalid flags are rejected.

All other tests in this folder run on its output, too (manifests.COMMANDS).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY, IMAGE, Rendered, kustomize
from network_rules import End, allowed
from test_deploy_network import WORKER

from elastic.cli import kube
from elastic.errors import ConfigError

DIGEST = "sha256:" + "a" * 64
Render = Callable[..., Rendered]


@pytest.fixture
def render(tmp_path: Path) -> Render:
    def run(*flags: str) -> Rendered:
        if not any(f.startswith(("--image=", "--overlay=dev")) for f in flags):
            flags = (IMAGE, *flags)
        argv = ["render", f"--output-dir={tmp_path / 'mine'}", *flags]
        assert kube.main(argv) == 0
        return Rendered("mine", kustomize(tmp_path / "mine"))

    return run


def test_without_flags_the_output_equals_the_overlay(render: Render) -> None:
    own = (
        f"--image=torch-elastic-harness:{importlib.metadata.version('torch-elastic-harness')}-cuda"
    )
    assert render(own).objects == kustomize(DEPLOY / "overlays" / "prod")
    assert render("--overlay=dev").objects == kustomize(DEPLOY / "overlays" / "dev")


def test_node_and_process_counts_are_rendered(render: Render) -> None:
    got = render("--nodes=3:9", "--gpus-per-node=4")
    assert got.one("StatefulSet", "workers")["spec"]["replicas"] == 9
    (container,) = got.workers.spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert got.settings["PET_NNODES"] == "3:9"


def test_a_fixed_size_is_a_range_of_one(render: Render) -> None:
    assert render("--nodes=4").settings["PET_NNODES"] == "4:4"


@pytest.mark.parametrize("image", ["r.example:5000/team/train:1.4.2", f"r.example/train@{DIGEST}"])
def test_the_image_is_set_on_all_containers(render: Render, image: str) -> None:
    got = render(f"--image={image}")
    for component in ("worker", "finisher"):
        (pod,) = got.pods(component)
        assert [c["image"] for c in pod.containers] == [image]


@pytest.mark.parametrize("overlay", ["prod", "dev", "job", "jobset", "trainer"])
def test_script_and_arguments_are_rendered(render: Render, overlay: str) -> None:
    got = render(f"--overlay={overlay}", "train.py", "--lr", "3e-4", "--", "$(HOME)", "two words")
    (container,) = got.workers.spec["containers"]
    assert container["args"][:4] == ["run", "train.py", "--lr", "3e-4"]
    assert container["args"][-2:] == ["$$(HOME)", "two words"], "the kubelet would fill it in"


def test_the_run_id_sets_the_checkpoint_folder(render: Render) -> None:
    settings = render("--run-id=llama-7").settings
    assert settings["PET_RDZV_ID"] == "llama-7"
    assert settings["ELASTIC_CHECKPOINTS"] == "/checkpoints/llama-7"


def test_checkpoints_in_a_storage_class(render: Render) -> None:
    claim = render("--checkpoints=class:lustre").one("PersistentVolumeClaim", "checkpoints")
    assert claim["spec"]["storageClassName"] == "lustre"


@pytest.mark.parametrize("overlay", ["prod", "dev", "job", "jobset", "trainer"])
def test_checkpoints_in_a_claim_that_exists(render: Render, overlay: str) -> None:
    got = render(f"--overlay={overlay}", "--checkpoints=claim:mine")
    assert not got.of("PersistentVolumeClaim", "checkpoints")
    claims = [v.get("persistentVolumeClaim") for v in got.workers.spec["volumes"]]
    assert {"claimName": "mine"} in claims


@pytest.mark.parametrize("overlay", ["prod", "dev", "job", "jobset", "trainer"])
def test_checkpoints_in_an_object_store(render: Render, overlay: str) -> None:
    got = render(f"--overlay={overlay}", "--checkpoints=s3://bucket/runs", "--run-id=r2")
    assert got.settings["ELASTIC_CHECKPOINTS"] == "s3://bucket/runs/r2"
    assert not got.of("PersistentVolumeClaim", "checkpoints")
    volumes = {v["name"] for v in got.workers.spec["volumes"]}
    mounts = {m["name"] for m in got.workers.spec["containers"][0]["volumeMounts"]}
    assert "checkpoints" not in volumes | mounts
    assert volumes == mounts >= {"tmp", "shm"}
    assert allowed(got.of("NetworkPolicy"), WORKER, End(outside=True), 443)


def test_the_printed_objects_equal_the_applied_ones(
    render: Render, capsys: pytest.CaptureFixture[str]
) -> None:
    written = render("--nodes=2:3")
    capsys.readouterr()
    assert kube.main(["render", IMAGE, "--nodes=2:3"]) == 0
    assert tuple(yaml.safe_load_all(capsys.readouterr().out)) == written.objects


REFUSED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # flags, the part named in the error, the rule
    ((), "--overlay=prod without --image", "--image=REGISTRY/NAME:TAG"),
    (("--overlay=trainer",), "--overlay=trainer without --image", "--image=REGISTRY/NAME:TAG"),
    (("--image=train",), "--image=train ", "exact version"),
    (("--image=train:latest",), "--image=train:latest", "exact version"),
    (("--nodes=5:2",), "--nodes=5:2", "--nodes=2:4"),
    (("--nodes=many",), "--nodes=many", "--nodes=2:4"),
    (("--nodes=",), "--nodes= ", "--nodes=2:4"),
    (("--gpus-per-node=0",), "--gpus-per-node=0", "dev"),
    (("--overlay=dev", "--gpus-per-node=1"), "--overlay=dev", "has no GPUs"),
    (("--with=spott",), "did you mean 'spot'", "known"),
    (("--with=spot", "--grace=90"), "--grace=90", "omit one"),
    (("--grace=5",), "no time for a checkpoint", "or more"),
    (("--run-id=a/b",), "a/b", "63 at most"),
    (("--run-id=..",), "'..'", "beginning and ending"),
    ((f"--run-id={'a' * 300}",), "a" * 300, "63 at most"),
    (("--run-id=",), "--run-id=''", "letters"),
    (("--run-id=r\n1",), "r\\n1", "letters"),
    (("--run-id=none",), "--run-id=none", "llama-7"),
    (("--nodes=2:3000000000",), "--nodes=2:3000000000", "below 1000000"),
    (("--checkpoints=/mnt/nfs",), "/mnt/nfs", "class:NAME"),
    (("--checkpoints=claim://mine",), "claim://mine", "claim:NAME"),
    (("--checkpoints=class://fast",), "class://fast", "class:NAME"),
    (("--checkpoints=FILE:///mnt/runs",), "FILE:///mnt/runs", "class:NAME"),
    (("--checkpoints=S3://bucket/runs",), "S3://bucket/runs", "lower case"),
    (
        ("--checkpoints=s3://user:pass@bucket/runs",),
        "--checkpoints=… contains a password",
        "secret",
    ),
    (("--checkpoints=s3://",), "s3://", "BUCKET"),
    (("--checkpoints=s3://bucket/../other",), "s3://bucket/../other", "'..'"),
    (("--checkpoints=s3://bucket/a b",), "a b", "spaces"),
    (("--checkpoints=file:///mnt/runs",), "file:///mnt/runs", "class:NAME"),
    (("--checkpoints=memory://runs",), "memory://runs", "s3://bucket/prefix"),
    (("--namespace=kube-system",), "kube-system", "only for training jobs"),
    (("--namespace=default",), "--namespace=default", "only for training jobs"),
    (("--with=own-certificates", "--overlay=dev"), "--overlay=dev", "omit one"),
    (("--with=node-tls", "--name=llama"), "--name=llama", "its own namespace"),
    (("--with=etcd-monitoring", "--name=llama"), "--name=llama", "overlays/shared"),
    (("--with=etcd-monitoring", "--overlay=dev"), "--overlay=dev", "omit one"),
    (("--overly=prod",), "--overly", "-h"),
    # resources and placement
    (("--memory=64GB",), "--memory=64GB", "256Gi"),
    (("--memory=64",), "--memory=64", "256Gi"),
    (("--memory=400m",), "--memory=400m", "256Gi"),
    (("--storage-size=-1Gi",), "--storage-size=-1Gi", "256Gi"),
    (("--storage-size=1Ti", "--checkpoints=claim:mine"), "--storage-size=1Ti", "omit one"),
    (("--node-selector=pool",), "--node-selector=pool", "KEY=VALUE"),
    (("--node-selector=pool=a", "--node-selector=pool=b"), "'a' and as 'b'", "choose one"),
    (("--label=app.kubernetes.io/instance=x",), "app.kubernetes.io/instance", "another key"),
    (("--label=pod-security.kubernetes.io/enforce=privileged",), "pod-security", "another key"),
    (("--label=kueue.x-k8s.io/queue-name=a",), "kueue.x-k8s.io/queue-name", "another key"),
    (("--label=kubernetes.io/metadata.name=a",), "metadata.name", "another key"),
    (("--label=statefulset.kubernetes.io/pod-name=a",), "pod-name", "another key"),
    (("--label=job-name=a",), "--label=job-name", "another key"),
    (("--label=controller-revision-hash=a",), "controller-revision-hash", "another key"),
    # access
    (("--env=AWS_REGION",), "--env=AWS_REGION", "KEY=VALUE"),
    (("--env=AWS_SECRET_ACCESS_KEY=x",), "AWS_SECRET_ACCESS_KEY", "--env-from-secret"),
    (("--env=ELASTIC_HEALTH_PORT=9000",), "ELASTIC_HEALTH_PORT", "settings"),
    (
        ("--env=AWS_ENDPOINT_URL=minio:port", "--checkpoints=s3://b/x"),
        "AWS_ENDPOINT_URL=minio:port",
        "http://HOST:PORT",
    ),
    (
        ("--env=AWS_ENDPOINT_URL=//minio:9000", "--checkpoints=s3://b/x"),
        "AWS_ENDPOINT_URL=//minio:9000",
        "http://HOST:PORT",
    ),
    (("--env=AZURE_STORAGE_CONNECTION_STRING=a",), "CONNECTION_STRING", "--env-from-secret"),
    (("--env=HTTPS_PROXY=http://me:pass@p:1",), "HTTPS_PROXY=… contains", "--env-from-secret"),
    (("--service-account-annotation=role",), "=role", "KEY=VALUE"),
    (
        ("--service-account-annotation=config.kubernetes.io/local-config=true",),
        "config.kubernetes.io/local-config",
        "eks.amazonaws.com/role-arn",
    ),
    (
        ("--service-account-annotation=azure.workload.identity/client-id=1",),
        "azure.workload.identity/client-id",
        "--label=azure.workload.identity/use=true",
    ),
    # several jobs
    (("--name=7b",), "--name=7b", "begin with a letter"),
    (("--name=Llama",), "--name=Llama", "lower-case"),
    (("--checkpoints=class:",), "--checkpoints=class:", "class:NAME"),
    ((f"--name={'a' * 33}",), "a" * 33, "32 characters"),
    (("--name=workers",), "--name=workers", "another"),
    (("--name=root",), "administers etcd", "another"),
    (("--name=etcd-client",), "administers etcd", "another"),
    (("--name=llama", "--overlay=dev"), "--overlay=dev", "omit one"),
)


@pytest.mark.parametrize(("flags", "said", "rule"), REFUSED)
def test_invalid_flags_are_rejected_before_any_file_is_written(
    tmp_path: Path, flags: tuple[str, ...], said: str, rule: str
) -> None:
    if flags and not any(f.startswith("--image") for f in flags) and "trainer" not in flags[0]:
        flags = (IMAGE, *flags)
    with pytest.raises(ConfigError) as error:
        kube.main(["render", f"--output-dir={tmp_path / 'mine'}", *flags])
    assert said in error.value.args[0]
    assert error.value.hint
    assert rule in str(error.value)
    assert "--nnodes" not in str(error.value)
    assert "pass@" not in str(error.value)
    assert not (tmp_path / "mine").exists()


def test_unusual_valid_values_are_accepted(render: Render) -> None:
    for image in ("localhost:5000/a/b__c:v1", "[::1]:5000/train:1", f"r.example/t:1@{DIGEST}"):
        (container,) = render(f"--image={image}").workers.spec["containers"]
        assert container["image"] == image
    got = render("--run-id=Llama_3.1-8b", f"--checkpoints=class:{'a' * 63}.b", "--memory=1.5Gi")
    assert got.settings["PET_RDZV_ID"] == "Llama_3.1-8b"
    (container,) = got.workers.spec["containers"]
    assert container["resources"]["limits"]["memory"] == "1536Mi"


def test_labels_of_other_tools_are_accepted(render: Render) -> None:
    for label in ("app.kubernetes.io/part-of=llm", "azure.workload.identity/use=true", "app=train"):
        key, _, value = label.partition("=")
        assert render(f"--label={label}").workers.labels[key] == value
    identity = "azure.workload.identity/client-id"
    got = render(
        f"--service-account-annotation={identity}=1", "--label=azure.workload.identity/use=true"
    )
    assert got.one("ServiceAccount", "workers")["metadata"]["annotations"] == {identity: "1"}


@pytest.mark.parametrize(("nodes", "least"), [("4", None), ("3:4", "3")])
def test_kueue_gets_a_valid_minimum_parallelism(
    render: Render, nodes: str, least: str | None
) -> None:
    """Its webhook wants one below the parallelism (kueue, pkg/controller/jobs/job/job_webhook.go:
    validatePartialAdmissionCreate)."""
    for flags in ((), ("--name=llama",)):
        (job,) = render("--overlay=job", "--with=kueue", f"--nodes={nodes}", *flags).of("Job")
        annotations = job["metadata"]["annotations"]
        assert annotations.get("kueue.x-k8s.io/job-min-parallelism") == least
        assert job["spec"]["parallelism"] == 4
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"].endswith("training")


def test_a_fixed_size_causes_a_warning(render: Render, capsys: pytest.CaptureFixture[str]) -> None:
    render("--nodes=4")
    assert "`kubectl drain` blocks" in capsys.readouterr().err
    render("--nodes=4:5")
    render()
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("overlay", ["prod", "job", "jobset", "trainer"])
def test_without_cert_manager_none_of_its_kinds_are_rendered(render: Render, overlay: str) -> None:
    """In any order of components: those that add certificates come first."""
    for flags, secrets in (
        (("--with=node-tls",), {"etcd-client-tls", "node-tls"}),
        (("--name=llama",), {"llama-etcd-user-tls"}),
    ):
        got = render(f"--overlay={overlay}", "--with=own-certificates", *flags)
        assert not [o for o in got.objects if "cert-manager" in o["apiVersion"]]
        volumes = got.workers.spec["volumes"]
        assert {v["secret"]["secretName"] for v in volumes if "secret" in v} == secrets


def test_a_flag_enables_monitoring_of_etcd(render: Render) -> None:
    (monitor,) = render("--with=etcd-monitoring", "--label=release=prometheus").of("PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus", "which operators look for"


def test_an_unusable_output_folder_is_rejected(tmp_path: Path) -> None:
    def refused(output: Path) -> str:
        before = {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(ConfigError) as error:
            kube.main(["render", IMAGE, f"--output-dir={output}"])
        assert {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file()} == before
        assert error.value.hint
        return str(error.value)

    file = tmp_path / "file"
    file.write_text("of somebody else")
    assert f"--output-dir={file} is a file" in refused(file)
    assert f"--output-dir={file / 'below'}" in refused(file / "below")
    for name in ("kustomization.yml", "Kustomization"):
        beside = tmp_path / f"with-{name}"
        beside.mkdir()
        (beside / name).write_text("resources: []\n")
        assert name in refused(beside)
    (tmp_path / "kustomization.yaml").write_text("resources: []\n")
    assert "exists" in refused(tmp_path)


def test_rendered_output_can_be_overwritten(render: Render) -> None:
    assert render("--nodes=2:3").settings["PET_NNODES"] == "2:3"
    assert render("--nodes=2:5").settings["PET_NNODES"] == "2:5"
