"""torchrun's side: the rendezvous handler ``etcd`` and what surrounds one launch of workers.

Start with ``entrypoint``, which torch loads, then ``handler`` and ``launch``. Every private name of
torch's agent is in ``torch_private``, that of its registry in ``torch_registry``. ``replacement``
restarts only a dead worker; ``signals`` and ``endings`` are for programs that launch; ``scripts``
warns of scripts that lose more than they need; ``error_files`` has torch's agent survive what a
killed worker has left.

The top of the agent's side: it imports all of it, and nothing imports it.
"""
