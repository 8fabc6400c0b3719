"""One node of a job at run time: its thread, its workers, and how it leaves.

Start with ``service``, which is what torchrun's main thread calls; it waits for worlds in
``world_wait``. Behind it ``loop`` is the node's own thread: it owns the node's key and lease,
receives worlds (``messages``), follows the workers (``workers``, ``failure_reporter``) and, where
its node leads, does the leader's duties (:mod:`elastic.leadership`).
``isolation`` and ``permission`` end training on a node that has lost etcd; ``leaving`` and
``parking`` are its orderly ends.

Imports everything below it but :mod:`elastic.rendezvous`, and never torch.
"""
