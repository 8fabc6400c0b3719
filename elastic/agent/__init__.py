"""One node of a job at run time: its thread, its workers, and how it leaves.

Start with ``service``, which torchrun's main thread calls; it waits for worlds in ``world_wait``.
Behind it, ``loop`` is the node's own thread: it maintains the node's key and lease
(``registration``), receives worlds (``messages``), supervises the workers
(:mod:`elastic.agent.supervision`) and, on the leading node, performs the leader's tasks
(:mod:`elastic.leadership`). ``admission`` refuses incompatible nodes; ``isolation`` and
``permission`` end training on a node without contact to etcd; :mod:`elastic.agent.ending` contains
the graceful ends.

May import everything below it, but neither :mod:`elastic.rendezvous` nor torch.
"""
