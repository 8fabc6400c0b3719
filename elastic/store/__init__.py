"""Where a job's records are kept: ``keyvalue`` is the protocol that the rest is written against.

:mod:`elastic.store.etcd` implements it on etcd v3;
:class:`elastic.testing.doubles.memory_store.MemoryStore` in one process, for tests. Both pass
``tests/contract``. :mod:`elastic.store.embedded` runs a local etcd for laptops and demos.
"""
