"""The store on etcd v3, 3.4 to 3.6, through the messages and stubs of the ``etcd3`` package.

Start with ``store``. ``connection`` keeps one connection to one member and moves to the next;
``calls`` retries unary calls; ``lease`` and ``watch`` survive their connections; ``failures``
classifies errors of gRPC. ``endpoints`` and ``options`` are the addresses and credentials set by
the user; ``compat`` imports etcd3 with any protobuf.
"""
