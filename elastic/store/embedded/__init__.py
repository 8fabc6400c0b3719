"""An etcd on this machine's loopback, for laptops, demos and tests. Never for production.

``etcd`` is its API, ``process`` the server's process, binary and ports.
"""
