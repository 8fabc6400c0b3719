"""The secret of a run: shared by all agents, whichever starts first, also after a wiped store."""

from __future__ import annotations

import json

import pytest
from kit.memory_store import MemoryServer, MemoryStore

from elastic.agent.node import LIVENESS, MEMORY, STORE, RunSecret
from elastic.errors import RecordError
from elastic.membership.records import Keys, Secret, encode
from elastic.telemetry.log import get_logger
from elastic.wire.handshake import SecretKey

KEYS = Keys.of("/elastic", "job")


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


def test_all_agents_of_a_run_have_the_same_keys(server: MemoryServer) -> None:
    first, second = (RunSecret.obtain(MemoryStore(server), KEYS) for _ in range(2))
    for purpose in (LIVENESS, STORE, MEMORY):
        assert first.key(purpose) == second.key(purpose)
    assert len({first.key(purpose).text for purpose in (LIVENESS, STORE, MEMORY)}) == 3


def test_another_run_with_a_copied_secret_has_other_keys(
    server: MemoryServer,
) -> None:
    other = Keys.of("/elastic", "job-2")
    store = MemoryStore(server)
    ours = RunSecret.obtain(store, KEYS)
    entry = store.get(KEYS.secret)
    assert entry is not None
    store.put(other.secret, entry.value)
    assert RunSecret.obtain(store, other).key(STORE) != ours.key(STORE)


def test_the_second_agent_adopts_the_secret_of_the_first(server: MemoryServer) -> None:
    """Both have read the key, and found no secret."""

    class Late(MemoryStore):
        def compare_and_swap(self, key: str, *args: object, **kwargs: object) -> int | None:
            RunSecret.obtain(MemoryStore(server), KEYS)
            return super().compare_and_swap(key, *args, **kwargs)  # type: ignore[arg-type]

    late = RunSecret.obtain(Late(server), KEYS)
    assert late.key(STORE) == RunSecret.obtain(MemoryStore(server), KEYS).key(STORE)


def test_the_agents_restore_the_secret_after_a_wipe(server: MemoryServer) -> None:
    store = MemoryStore(server)
    secret = RunSecret.obtain(store, KEYS)
    before = secret.key(STORE)
    server.wipe()
    secret.restore(store, KEYS)
    assert secret.key(STORE) == RunSecret.obtain(store, KEYS).key(STORE) == before


def test_a_joining_node_may_write_a_new_secret_after_a_wipe(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", warnings.append)
    store = MemoryStore(server)
    old = RunSecret.obtain(store, KEYS)
    server.wipe()
    joined = RunSecret.obtain(store, KEYS)
    assert joined.key(STORE) != old.key(STORE)
    old.restore(store, KEYS)
    assert joined.key(STORE) == old.key(STORE)
    assert "different secret" in warnings[0]


@pytest.mark.parametrize(
    "value",
    [b"", b"secret", b"{}", encode(Secret(secret="c2hvcnQ=")), encode(Secret(secret="no base64"))],
)
def test_an_invalid_secret_is_reported_by_key_but_not_shown(
    server: MemoryServer, value: bytes
) -> None:
    store = MemoryStore(server)
    store.put(KEYS.secret, value)
    with pytest.raises(RecordError, match="/elastic/job/secret") as refused:
        RunSecret.obtain(store, KEYS)
    assert "c2hvcnQ" not in str(refused.value) and "no base64" not in str(refused.value)


def test_the_secret_is_not_part_of_any_repr() -> None:
    key = SecretKey.generate()
    record = Secret(secret=key.text)
    assert key.text not in repr(record) + repr(key) + repr(RunSecret(key, KEYS.root))
    assert json.loads(encode(record))["secret"] == key.text
