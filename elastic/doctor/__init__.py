"""``elastic doctor``: checks this machine, etcd and the links between nodes.

Facts are gathered at the edge: ``machine`` (run in child processes with a deadline by ``probes``),
``etcd``, ``between`` (TCP from node to node) and ``operations`` (torch.distributed, in the
processes of ``ranks``). The files ``*_verdicts`` turn facts into ``findings`` and do nothing else.
``examination`` calls them in order, ``meeting`` lets the nodes of one examination exchange values
through etcd, and ``preflight`` is the short form that an agent runs before its node may join.

Start with ``examination``. Only ``operations``, which runs in separate processes, imports torch.
Nothing here prints: ``elastic.cli.doctor`` does.
"""
