"""torch's functions to abort communicators, as used here: fails if a torch version differs.

Checked without a GPU: which calls NCCL's backends have, and what torch's own
``_abort_process_group`` calls.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic.groups import group, pending

ABORT = inspect.getsource(distributed_c10d._abort_process_group)
NCCL_BACKENDS = ("ProcessGroupNCCL", "ProcessGroupNCCL2")


def test_torch_aborts_all_groups_as_one_in_a_known_way() -> None:
    """Either by _group_start of the backend, or by a coalescing region (from 2.15 on)."""
    assert ("_group_start" in ABORT) != ("_coalescing_manager" in ABORT)
    assert "pg_to_abort.abort()" in ABORT


def test_groups_have_the_functions_that_an_abort_uses() -> None:
    for name in ("_start_coalescing", "_end_coalescing", "_get_backend", "_device_types", "abort"):
        assert hasattr(dist.ProcessGroup, name), name
    assert hasattr(distributed_c10d._world, "pg_names")


@pytest.mark.parametrize("name", NCCL_BACKENDS)
def test_an_nccl_backend_can_be_aborted_within_a_region(name: str) -> None:
    """Without one, aborts of several communicators wait for each other (pytorch issue 119797)."""
    backend = getattr(distributed_c10d, name, None)
    if backend is None:  # absent in this version, or in a build without CUDA
        assert name == "ProcessGroupNCCL2" or not dist.is_nccl_available()
        return
    assert hasattr(backend, "abort")
    assert hasattr(backend, "_group_start") or hasattr(backend, "supports_coalescing")


def test_the_backends_own_region_is_preferred() -> None:
    calls: list[str] = []

    class Legacy:
        supports_coalescing = True  # as in ProcessGroupNCCL

        def _group_start(self) -> None:
            calls.append("group start")

        def _group_end(self) -> None:
            calls.append("group end")

    with group._as_one(object(), Legacy(), torch.device("cpu")):
        calls.append("aborts")
    assert calls == ["group start", "aborts", "group end"]


def test_the_region_ends_if_an_abort_fails() -> None:
    """Otherwise every later NCCL call in this thread would be part of it."""
    calls: list[str] = []

    class Legacy:
        def _group_start(self) -> None:
            calls.append("group start")

        def _group_end(self) -> None:
            calls.append("group end")

    with (
        pytest.raises(RuntimeError),
        group._as_one(object(), Legacy(), torch.device("cpu")),
    ):
        raise RuntimeError("the abort fails")
    assert calls == ["group start", "group end"]


def test_every_backend_named_nccl_runs_on_a_stream() -> None:
    """A new name must be checked, and added to elastic/groups/pending.py."""
    names = {name for name in dist.Backend.backend_list if "nccl" in name}
    assert names
    for name in names:
        assert pending._BY_BACKEND[name].is_on_stream, name
