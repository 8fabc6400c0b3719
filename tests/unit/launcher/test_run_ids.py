"""The id of a job, as torchrun gives it to the rendezvous handler."""

from __future__ import annotations

import tempfile

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic.errors import ConfigError
from elastic.launcher.handler import NO_RUN_ID, _run_id
from elastic.membership.records import LONGEST_RUN_ID_BYTES, Keys


def of(run_id: str, max_nodes: int = 2) -> str:
    return _run_id(RendezvousParameters("etcd-v3", "localhost:2379", run_id, 1, max_nodes))


@pytest.mark.parametrize("run_id", ["a" * LONGEST_RUN_ID_BYTES, "ü" * (LONGEST_RUN_ID_BYTES // 2)])
def test_the_longest_run_id_still_names_a_folder(run_id: str) -> None:
    """torch creates one for the logs in this way."""
    assert Keys.of("/elastic", run_id).run_id == run_id
    with tempfile.TemporaryDirectory(prefix=f"{run_id}_"):
        pass


@pytest.mark.parametrize("run_id", ["a" * 247, "ü" * 124, "\udcff" * 247])
def test_a_longer_run_id_is_refused_with_its_beginning_and_the_limit(run_id: str) -> None:
    with pytest.raises(ConfigError, match="is longer than 246 bytes") as caught:
        Keys.of("/elastic", run_id)
    assert run_id[:40] in caught.value.message and "--rdzv-id" in caught.value.hint


def test_only_a_job_of_one_node_gets_an_id() -> None:
    assert of(NO_RUN_ID, max_nodes=1).startswith("job-")
    with pytest.raises(ConfigError, match="no run id"):
        of(NO_RUN_ID)
