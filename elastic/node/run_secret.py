"""The secret of a run: created by its first agent, in etcd with the run's other records.

Only clients that may read that key can join the run (docs/security.md). Agents keep it in memory,
and pass only derived keys to their workers, one for each purpose.
"""

from __future__ import annotations

import threading

from elastic.errors import RecordError
from elastic.membership.records import Keys, Secret, decode, encode
from elastic.secure_channel.keys import SecretKey
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import get_logger

LIVENESS, STORE, MEMORY = "liveness", "store", "memory"
INSTANCE = "instance"  # identifies the run, among those with the same run id; no key


class RunSecret:
    """This agent's copy of the secret. Thread-safe: listeners read their keys at every
    handshake."""

    def __init__(self, secret: SecretKey, root: str) -> None:
        self._secret = secret
        self._root = root
        self._lock = threading.Lock()

    @classmethod
    def obtain(cls, store: KeyValue, keys: Keys) -> RunSecret:
        """The run's secret, created here if there is none yet. Raises CoordinationError."""
        return cls(_stored(store, keys, SecretKey.generate()), keys.root)

    def key(self, purpose: str) -> SecretKey:
        """The key for one purpose of this run."""
        with self._lock:
            return self._secret.derive(purpose, self._root)

    def restore(self, store: KeyValue, keys: Keys) -> None:
        """After etcd was wiped, write the secret back, or adopt the one that a joining node has
        created since.

        Open connections remain; new ones use the store's secret.
        """
        found = _stored(store, keys, self._secret)
        with self._lock:
            has_changed, self._secret = found != self._secret, found
        if has_changed:
            get_logger().warning(
                "etcd was wiped and has a different secret for this run: using the new one"
            )


def _stored(store: KeyValue, keys: Keys, proposed: SecretKey) -> SecretKey:
    """The one in the store; ``proposed`` if there was none."""
    entry = store.get(keys.secret)
    if entry is None:
        record = encode(Secret(secret=proposed.text))
        if store.compare_and_swap(keys.secret, record, expected_revision=0) is not None:
            return proposed
        entry = store.get(keys.secret)
    if entry is None:
        raise _broken(keys.secret, "was deleted immediately")
    try:
        return SecretKey.parse(decode(Secret, entry.key, entry.value).secret)
    except ValueError as error:
        raise _broken(keys.secret, f"holds {error}") from None


def _broken(key: str, what: str) -> RecordError:
    return RecordError(
        f"{key}: the run's secret {what}",
        hint="another program may write there; end this job, delete the key, and start it again, "
        "or use another --rdzv-id",
    )
