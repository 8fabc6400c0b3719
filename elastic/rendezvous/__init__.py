"""torchrun's side: the rendezvous handler ``etcd`` and what surrounds one launch of workers.

Start with ``entrypoint``, which torch loads, then ``handler`` and ``launch``. Every private name of
torch's agent is in ``torch_private``, that of its registry in ``torch_registry``. ``replacement``
restarts only a dead worker; ``signals`` and ``endings`` are for programs that launch; ``scripts``
warns about scripts that lose avoidable work; ``error_files`` makes torch's agent tolerate
incomplete files of killed workers.

The top of the agent's side: it may import all of it, and no package imports it.
"""
