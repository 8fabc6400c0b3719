"""An etcd on this machine's loopback, for laptops, demos and tests. Never for production.

Start with ``etcd``, its API; ``process`` is the server's process, binary and ports. May import what
:mod:`elastic.store` may.
"""
