"""The store of a job's records. Start with ``keyvalue``, the protocol that other packages use.

:mod:`elastic.store.etcd` implements it on etcd v3;
:class:`elastic.testing.doubles.memory_store.MemoryStore` in one process, for tests. Both pass
``tests/contract``. :mod:`elastic.store.embedded` runs a local etcd for laptops and demos. May
import errors and tuning.
"""
