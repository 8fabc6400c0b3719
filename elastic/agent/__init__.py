"""One node of a job at run time: its thread, its workers, and how it leaves.

Start with ``service``, which is what torchrun's main thread calls; it waits for worlds in
``world_wait``. Behind it ``loop`` is the node's own thread: it keeps the node's key and lease
(``registration``), receives worlds (``messages``), follows the workers
(:mod:`elastic.agent.supervision`) and, where its node leads, does the leader's duties
(:mod:`elastic.leadership`). ``admission`` refuses what cannot join; ``isolation`` and
``permission`` end training on a node that has lost etcd; ``leaving``, ``parking`` and ``job_end``
are the orderly ends.

Imports everything below it but :mod:`elastic.rendezvous`, and never torch.
"""
