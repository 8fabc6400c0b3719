"""The dimensions of a replica: how they map to ranks and samples, and what is rejected."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from elastic.errors import ConfigError
from elastic.groups.replica import mesh_of
from elastic.groups.world import ReplicaMesh, World, check_saved_stages
from elastic.link.link import LocalReplicas, Worker
from elastic.train.progress import RankState, Tag, choose


def world(rank: int, size: int, mesh: ReplicaMesh) -> World:
    return World(
        generation=1,
        nonce="",
        lineage=(),
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        node="node",
        is_launched=True,
        mesh=mesh,
    )


def test_without_a_mesh_each_rank_is_a_replica_with_its_own_data() -> None:
    mine = world(3, 5, ReplicaMesh.parse(None))
    assert (mine.replica, mine.replicas, mine.rank_in_replica) == (3, 5, 0)
    assert (mine.data_rank, mine.data_size) == (3, 5)


@pytest.mark.parametrize(
    ("dims", "parts"),
    [
        ({"shard": 2, "tp": 2}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"tp": 2, "shard": 2}, [0, 1, 0, 1, 2, 3, 2, 3]),
        ({"dp_shard": 4}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"pp": 2, "cp": 2}, [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_the_dimensions_determine_which_ranks_share_samples(
    dims: dict[str, int], parts: list[int]
) -> None:
    mesh = ReplicaMesh.parse(dims)
    ranks = [world(rank, 8, mesh) for rank in range(8)]
    assert [one.data_rank for one in ranks] == parts
    assert {one.data_size for one in ranks} == {max(parts) + 1}
    assert [one.replica for one in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({}, "names no dimension"),
        (
            {"rows": 2},
            r"mesh=\{'rows': 2\} has an unknown dimension 'rows'(.|\n)*known dimensions: shard, dp",
        ),
        ({"replicate": 2, "shard": 2}, r"'replicate'(.|\n)* Replicas are not a dimension"),
        ({"shard": 0}, "dimension 'shard' has size 0"),
        ({"shard": "2"}, "dimension 'shard' has size '2'"),
        ({"shard": True}, "dimension 'shard' has size True"),
    ],
)
def test_an_invalid_mesh_is_rejected(dims: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReplicaMesh.parse(dims)
    assert re.search(message, str(caught.value))
    assert caught.value.hint


@pytest.mark.parametrize("given", [4, "shard", [("shard", 2)], {2: 2}])
def test_a_mesh_that_is_not_a_dict_of_names_is_rejected(given: Any) -> None:
    with pytest.raises(ConfigError, match="not a dict of dimensions and their sizes"):
        ReplicaMesh.parse(given)


@pytest.mark.parametrize(
    ("dims", "stages"),
    [
        ({"pp": 2, "shard": 2}, [(0, (0, 1)), (0, (0, 1)), (1, (2, 3)), (1, (2, 3))]),
        ({"shard": 2, "pp": 2}, [(0, (0, 2)), (1, (1, 3)), (0, (0, 2)), (1, (1, 3))]),
    ],
)
def test_ranks_along_pp_hold_different_stages(
    dims: dict[str, int], stages: list[tuple[int, tuple[int, ...]]]
) -> None:
    mesh = ReplicaMesh.parse(dims)
    found = [mesh.stage_of(position) for position in range(4)]
    assert [(one.index, one.ranks) for one in found if one is not None] == stages
    assert {one.count for one in found if one is not None} == {2}
    assert mesh.dims_of_stage == ("shard",)
    assert [mesh.first_holder(position, {"pp"}) for position in range(4)] == [
        ranks[0] for _, ranks in stages
    ]


@pytest.mark.parametrize("dims", [{"pp": 1, "shard": 2}, {"shard": 2}, None])
def test_a_single_stage_is_the_model(dims: dict[str, int] | None) -> None:
    mesh = ReplicaMesh.parse(dims)
    assert (mesh.stages, mesh.stage_of(0)) == (1, None)
    assert mesh.has_stages is ("pp" in (dims or {}))


@pytest.mark.parametrize(
    ("keys", "mesh", "message"),
    [
        (["pp=0", "pp=1"], {"pp": 3}, r"x has 2 pipeline stages, and this job 3 pipeline stages"),
        (["pp=0", "pp=1"], {"shard": 2}, r"x has 2 pipeline stages, and this job no pipeline"),
        (["model", "seed"], {"pp": 2}, r"x has no pipeline stages, and this job 2 pipeline stages"),
    ],
)
def test_a_checkpoint_of_other_stages_is_refused_with_both_numbers(
    keys: list[str], mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_saved_stages(keys, ReplicaMesh.parse(mesh).stage_of(0), "x")
    assert "elastic.join(mesh=" in (caught.value.hint or "")
    check_saved_stages(["pp=0", "pp=1"], ReplicaMesh.parse({"pp": 2}).stage_of(1), "x")
    check_saved_stages(["model"], None, "x")


def test_a_node_with_a_partial_replica_is_rejected_with_a_hint() -> None:
    mesh = ReplicaMesh.parse({"shard": 3})
    mesh.check_node(6)
    with pytest.raises(
        ConfigError, match=r"5 workers .* replicas of 3 ranks.* 2 of them would wait"
    ) as caught:
        mesh.check_node(5)
    assert "--nproc-per-node must be a multiple of 3" in (caught.value.hint or "")


def test_a_replica_over_several_nodes_requires_replica_size() -> None:
    mesh = ReplicaMesh.parse({"shard": 4})
    mesh.check_node(2, replica_size=4)
    with pytest.raises(
        ConfigError, match=r"was not configured for replicas over 2 nodes"
    ) as caught:
        mesh.check_node(2)
    hint = "--nproc-per-node=4, or on every node --rdzv-conf=replica_size=4"
    assert hint in (caught.value.hint or "")
    with pytest.raises(ConfigError, match=r"replicas of 4 ranks .* form replicas of 8") as caught:
        mesh.check_node(2, replica_size=8)
    assert "--rdzv-conf=replica_size=4" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("device", "given", "backend"),
    [
        ("cpu", None, "gloo"),
        ("cpu", "gloo", "gloo"),
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("cuda", "nccl", "cpu:gloo,cuda:nccl"),
        ("cuda", "nccl-lazy", "cpu:gloo,cuda:nccl-lazy"),
        ("cuda", "cpu:gloo,cuda:nccl2", "cpu:gloo,cuda:nccl2"),
    ],
)
def test_the_backend_of_a_replica_follows_its_device(
    device: str, given: str | None, backend: str
) -> None:
    assert mesh_of({"shard": 1}, torch.device(device), given).backend == backend


@pytest.mark.parametrize(
    ("device", "given", "message"),
    [
        ("cpu", "mpi", "backend='mpi'): replicas on CPUs communicate with gloo"),
        ("cuda", "gloo", "backend='gloo'): replicas on GPUs communicate with NCCL"),
        ("cuda", "cpu:gloo,cuda:gloo", "replicas on GPUs communicate with NCCL"),
        ("xpu", None, "on xpu: replicas train on CPUs with gloo and on GPUs with NCCL"),
    ],
)
def test_unsupported_backends_of_a_replica_are_rejected(
    device: str, given: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        mesh_of({"shard": 1}, torch.device(device), given)


def state(tag: Tag | None) -> RankState:
    return RankState("nonce", tag)


def test_a_replica_has_a_state_only_if_all_of_its_ranks_do() -> None:
    new, old = Tag(1, 8), Tag(1, 7)
    half = [state(new), state(None)]
    found = choose([*half, state(old), state(old), state(old), state(old)], 2)
    assert (found.source, found.tag, found.holders) == (2, old, (1, 2))
    assert found.receivers == (0, 1)  # both, although one is more advanced


def test_without_a_complete_replica_the_state_is_fresh() -> None:
    tag = Tag(1, 8)
    found = choose([state(tag), state(None), state(None), state(tag)], 2)
    assert found.is_fresh


def worker(pid: int, local_rank: int) -> Worker:
    return Worker(pid=pid, local_rank=local_rank, token=pid)


def test_local_ranks_of_a_replica_meet_and_end_together() -> None:
    replicas = LocalReplicas()
    a, b, c, d = (worker(10 + rank, rank) for rank in range(4))
    assert replicas.join(a, 2) == ()
    assert replicas.join(d, 2) == ()
    assert set(replicas.join(b, 2)) == {a, b}
    assert set(replicas.join(c, 2)) == {c, d}
    assert replicas.siblings(a.pid) == (b,)
    replicas.leave(a.pid)
    replicas.leave(b.pid)
    again = worker(20, 0)
    assert replicas.join(again, 2) == ()  # not with the dead one
    assert replicas.siblings(99) == ()


def test_all_workers_of_a_node_join_a_replica_over_several_nodes() -> None:
    replicas = LocalReplicas()
    a, b = (worker(10 + rank, rank) for rank in range(2))
    assert replicas.join(a, 4, 2) == ()
    assert set(replicas.join(b, 4, 2)) == {a, b}
    assert replicas.siblings(a.pid) == (b,)
