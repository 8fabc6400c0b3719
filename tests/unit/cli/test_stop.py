"""``elastic stop``, ``resume`` and ``forget``: the records that they write, and their refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore

from elastic.cli import view as connection
from elastic.cli.forget import forget
from elastic.cli.main import main
from elastic.errors import ConfigError
from elastic.membership.records import Done, Keys, NodeState, Outcome, Stop, decode, encode

KEYS = Keys.of("/elastic", "llama-7")
DONE = Done(
    outcome=Outcome.SUCCESS,
    reason="n1 finished",
    exit_code=0,
    generation=1,
    final_step=9,
    time_s=1.0,
)


@pytest.fixture
def store() -> MemoryStore:
    """A job with one node that has arrived, and no world."""
    store = MemoryStore()
    store.put(KEYS.node("id-n1"), encode(node("n1")), lease=store.lease(5.0))
    return store


@pytest.fixture
def cli(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``elastic ARGV`` on that store."""

    @contextmanager
    def opened(args: object, **_: object) -> Iterator[MemoryStore]:
        yield store

    for module in ("stop", "resume", "forget", "status"):
        monkeypatch.setattr(f"elastic.cli.{module}.job_store", opened)
    monkeypatch.setattr(connection, "job_store", opened)
    return lambda *argv: main([*argv, "--rdzv-endpoint=localhost:2379"])


def test_a_stop_is_recorded_shown_and_taken_back(
    cli: Callable[..., int], store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("stop", "llama-7") == 0
    entry = store.get(KEYS.stop)
    assert entry is not None and "@" in decode(Stop, entry.key, entry.value).by
    assert "elastic resume llama-7 lets it go on" in capsys.readouterr().out
    assert cli("status", "llama-7") == 0
    output = capsys.readouterr().out
    assert output.startswith("llama-7: stopped by ") and "n1 waits" in output
    assert cli("resume", "llama-7") == 0
    assert capsys.readouterr().out == "llama-7 goes on with 1 waiting node: n1\n"
    assert store.get(KEYS.stop) is None
    assert cli("resume", "llama-7") == 0
    assert capsys.readouterr().out == "llama-7 is not stopped\n"


def test_a_job_that_still_trains_at_the_timeout_is_reported(
    cli: Callable[..., int], store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    record = world("n1", "n2")
    running = node("n1", NodeState.READY, running=record, in_process=True)
    store.put(KEYS.world, encode(record))
    store.put(KEYS.node("id-n1"), encode(running))
    assert cli("stop", "llama-7", "--timeout=0s") == 124
    assert "still stops after 0s" in capsys.readouterr().out
    assert cli("status", "llama-7") == 0
    assert "llama-7: stopping, by " in capsys.readouterr().out


def test_a_job_with_nodes_is_not_forgotten_and_one_without_leaves_nothing(
    cli: Callable[..., int], store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Keys.of("/elastic", "llama-70")
    store.put(other.node("id-n9"), encode(node("n9")))
    assert cli("forget", "llama-7") == 2
    assert "llama-7 has 1 node: n1" in capsys.readouterr().err
    # (It has left in order, in a world without members: a record without a lease remains.)
    store.put(KEYS.node("id-n1"), encode(node("n1", NodeState.LEAVING)))
    store.put(KEYS.done, encode(DONE))
    for command in ("stop", "resume"):
        assert cli(command, "llama-7") == 2
        assert "llama-7 has ended: n1 finished" in capsys.readouterr().err
    assert cli("forget", "llama-7") == 0
    assert [entry.key for entry in store.list("/").entries] == [other.node("id-n9")]


def test_a_node_that_registers_while_its_job_is_forgotten_keeps_its_keys() -> None:
    """It has read the secret of the run, which is deleted with the rest or not at all."""

    class Joined(MemoryStore):
        def delete_unchanged(self, keys: Sequence[str], *, revision: int) -> bool:
            self.put(KEYS.node("id-n2"), encode(node("n2")), lease=self.lease(5.0))
            return super().delete_unchanged(keys, revision=revision)

    store = Joined()
    store.put(KEYS.secret, b"secret")
    with pytest.raises(ConfigError, match="has 1 node: n2"):
        forget(store, KEYS)
    assert [entry.key for entry in store.list(KEYS.root).entries] == [
        KEYS.node("id-n2"),
        KEYS.secret,
    ]


def test_a_job_whose_prefix_is_the_root_of_a_forgotten_one_keeps_its_keys() -> None:
    store, inner = MemoryStore(), Keys.of("/elastic/llama-7", "world2")
    for key in (KEYS.world, KEYS.secret, KEYS.node("left"), inner.world, inner.node("id-n1")):
        store.put(key, b"")
    assert forget(store, KEYS) == 3
    remaining = [entry.key for entry in store.list("/").entries]
    assert remaining == [inner.node("id-n1"), inner.world]


def test_a_job_is_not_forgotten_while_an_agent_leads_it(store: MemoryStore) -> None:
    """Its workers have finished, and it waits for those of the others."""
    store.put(KEYS.node("id-n1"), encode(node("n1", NodeState.FINISHED)))
    store.put(KEYS.leader, b"n1", lease=store.lease(5.0))
    with pytest.raises(ConfigError, match="its leader"):
        forget(store, KEYS)


def test_a_job_that_ends_meanwhile_is_not_stopped(
    cli: Callable[..., int], store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    swap = store.compare_and_swap

    def after_the_end(key: str, value: bytes, **conditions: object) -> int | None:
        store.put(KEYS.done, encode(DONE))
        return swap(key, value, **conditions)  # type: ignore[arg-type]

    store.compare_and_swap = after_the_end  # type: ignore[method-assign]
    assert cli("stop", "llama-7") == 2
    assert "llama-7 has ended: n1 finished" in capsys.readouterr().err
    assert store.get(KEYS.stop) is None


def test_a_job_that_ends_in_its_last_step_is_not_waited_for(
    cli: Callable[..., int], store: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    record = world("n1", "n2")
    running = node("n1", NodeState.READY, running=record, in_process=True)
    store.put(KEYS.node("id-n1"), encode(running))
    swap = store.compare_and_swap

    def then_it_ends(key: str, value: bytes, **conditions: object) -> int | None:
        revision = swap(key, value, **conditions)  # type: ignore[arg-type]
        store.put(KEYS.done, encode(DONE))
        return revision

    store.compare_and_swap = then_it_ends  # type: ignore[method-assign]
    assert cli("stop", "llama-7") == 0
    assert "llama-7 has ended before it stopped: n1 finished" in capsys.readouterr().out


def test_a_misspelled_run_shows_those_that_exist(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("stop", "resume", "forget"):
        assert cli(command, "lama-7") == 2
        error = capsys.readouterr().err
        assert "there is no job lama-7, did you mean 'llama-7'?" in error
