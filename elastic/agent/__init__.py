"""One node of a job at run time: its thread, its workers, and how it leaves.

Start with ``service``, which is what torchrun's main thread calls. Behind it ``loop`` is the node's
own thread: it owns the node's key and lease, learns of worlds (``messages``), follows the workers
(``workers``) and, where its node leads, does the leader's duties (:mod:`elastic.leadership`).
``isolation`` and ``permission`` end training on a node that has lost etcd; ``leaving`` and
``parking`` are its orderly ends.

Imports everything below it but :mod:`elastic.rendezvous`, and never torch.
"""
