"""``elastic kube render``: every flag does what it says; what cannot work is refused.

All other tests in this folder run on its output, too (manifests.COMMANDS).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY, Rendered, kustomize
from network_rules import End, allowed
from test_deploy_network import WORKER

from elastic.cli import kube
from elastic.errors import ConfigError

DIGEST = "sha256:" + "a" * 64
Render = Callable[..., Rendered]


@pytest.fixture
def render(tmp_path: Path) -> Render:
    def run(*flags: str) -> Rendered:
        argv = ["render", f"--deploy={DEPLOY}", f"--output={tmp_path / 'mine'}", *flags]
        assert kube.main(argv) == 0
        return Rendered("mine", kustomize(tmp_path / "mine"))

    return run


def test_without_flags_it_is_the_overlay(render: Render) -> None:
    assert render().objects == kustomize(DEPLOY / "overlays" / "prod")


def test_sizes(render: Render) -> None:
    got = render("--nodes=3:9", "--gpus-per-node=4")
    assert got.one("StatefulSet", "workers")["spec"]["replicas"] == 9
    (container,) = got.workers.spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert got.settings["PET_NNODES"] == "3:9"


def test_a_fixed_size_is_a_range_of_one(render: Render) -> None:
    assert render("--nodes=4").settings["PET_NNODES"] == "4:4"


@pytest.mark.parametrize("image", ["r.example:5000/team/train:1.4.2", f"r.example/train@{DIGEST}"])
def test_the_image_is_everywhere(render: Render, image: str) -> None:
    got = render(f"--image={image}")
    for component in ("worker", "finisher"):
        (pod,) = got.pods(component)
        assert [c["image"] for c in pod.containers] == [image]


@pytest.mark.parametrize("overlay", ["prod", "dev", "job", "jobset", "trainer"])
def test_script_and_arguments(render: Render, overlay: str) -> None:
    got = render(f"--overlay={overlay}", "train.py", "--lr", "3e-4", "--", "$(HOME)", "two words")
    (container,) = got.workers.spec["containers"]
    assert container["args"][:4] == ["run", "train.py", "--lr", "3e-4"]
    assert container["args"][-2:] == ["$$(HOME)", "two words"], "the kubelet would fill it in"


def test_a_run_of_its_own(render: Render) -> None:
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


def test_printed_is_what_would_be_applied(
    render: Render, capsys: pytest.CaptureFixture[str]
) -> None:
    written = render("--nodes=2:3")
    capsys.readouterr()
    assert kube.main(["render", f"--deploy={DEPLOY}", "--nodes=2:3"]) == 0
    assert tuple(yaml.safe_load_all(capsys.readouterr().out)) == written.objects


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--image=train",), "--image=train "),
        (("--image=train:latest",), "--image=train:latest"),
        (("--nodes=5:2",), "5:2"),
        (("--nodes=many",), "many"),
        (("--gpus-per-node=0",), "--gpus-per-node=0"),
        (("--overlay=dev", "--gpus-per-node=1"), "--overlay=dev"),
        (("--with=spott",), "did you mean 'spot'"),
        (("--overlay=trainer", "--with=volcano"), "--with=volcano"),
        (("--with=spot", "--grace=90"), "--grace=90"),
        (("--grace=5",), "no time for a checkpoint"),
        (("--run-id=a/b",), "a/b"),
        (("--checkpoints=/mnt/nfs",), "/mnt/nfs"),
        (("--namespace=Team_A",), "Team_A"),
        (("--deploy=/nowhere",), "/nowhere"),
        (("--overly=prod",), "--overly"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        kube.main(["render", f"--deploy={DEPLOY}", f"--output={tmp_path / 'mine'}", *flags])
    assert said in str(error.value)
    assert error.value.hint
    assert not (tmp_path / "mine").exists()


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\n")
    with pytest.raises(ConfigError, match="exists"):
        kube.main(["render", f"--deploy={DEPLOY}", f"--output={tmp_path}"])
    assert (tmp_path / "kustomization.yaml").read_text() == "resources: []\n"
