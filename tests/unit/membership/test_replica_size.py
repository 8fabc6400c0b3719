"""The option ``replica_size``: valid combinations, rounded limits, and errors."""

from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.link.link import Heartbeat, Message
from elastic.membership.replicas import require_whole_replicas
from elastic.tuning.options import read_options
from elastic.worker.worlds import Worlds


@pytest.mark.parametrize(
    ("replica_size", "nproc", "limits", "expected"),
    [
        (1, 8, (3, 9), (3, 9)),
        (4, 8, (3, 9), (3, 9)),  # two replicas on a node
        (8, 8, (1, 1), (1, 1)),
        (8, 4, (3, 9), (4, 8)),
        (2, 1, (3, 8), (4, 8)),
        (2, 1, (1, 2), (2, 2)),
        (6, 2, (1, 8), (3, 6)),
    ],
)
def test_limits_are_rounded_to_complete_replicas(
    replica_size: int, nproc: int, limits: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert require_whole_replicas(replica_size, nproc=nproc, limits=limits) == expected


@pytest.mark.parametrize(("replica_size", "nproc"), [(2, 3), (4, 6), (6, 4), (3, 8)])
def test_an_incompatible_number_of_workers_is_rejected(replica_size: int, nproc: int) -> None:
    with pytest.raises(ConfigError) as caught:
        require_whole_replicas(replica_size, nproc=nproc, limits=(1, 8))
    expected = f"replica_size={replica_size} is incompatible with {nproc} workers on this node"
    assert caught.value.message.startswith(expected)
    assert caught.value.hint is not None
    assert "--nproc-per-node=" in caught.value.hint and "replica_size=..." in caught.value.hint


@pytest.mark.parametrize("limits", [(1, 1), (3, 3), (5, 5)])
def test_limits_that_allow_no_complete_replica_are_rejected(limits: tuple[int, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        require_whole_replicas(2, nproc=1, limits=limits)
    assert f"--nnodes={limits[0]}:{limits[1]} allows no whole number of replicas" in (
        caught.value.message
    )
    least = limits[0] + 1
    assert caught.value.hint is not None and f"--nnodes={least}:{least}" in caught.value.hint
    assert require_whole_replicas(2, nproc=1, limits=(least, least)) == (least, least)


def test_replica_size_is_read_from_options_and_environment() -> None:
    assert read_options({}, {}).replica_size == 1
    assert read_options({}, {"ELASTIC_REPLICA_SIZE": "4"}).replica_size == 4
    assert read_options({"replica_size": "8"}, {"ELASTIC_REPLICA_SIZE": "4"}).replica_size == 8
    for text in ("0", "-2", "two"):
        with pytest.raises(ConfigError, match="replica_size"):
            read_options({"replica_size": text}, {})


class SilentAgent(Worlds):
    """A link without an agent that records the messages sent."""

    def __init__(self) -> None:
        position = Heartbeat(generation=0, step=0, phase="other", step_time_s=0.0)
        super().__init__(abort=lambda: None, position=lambda: position, current_step=lambda: None)
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


def test_in_process_mode_without_a_mesh_fails_before_any_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ELASTIC_REPLICA_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    worlds = SilentAgent()
    with pytest.raises(ConfigError) as caught:
        worlds.next()
    assert "with replica_size=4 and 2 workers on this node" in caught.value.message
    assert 'mesh={"shard": 4}' in (caught.value.hint or "")
    assert "mode=restart" in (caught.value.hint or "")
    assert not worlds.sent
