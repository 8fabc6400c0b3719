"""The kill-test kit, public: hurt a real job on one machine and prove that nothing was lost.

- :mod:`elastic.testing.cluster`: nodes of a job, each a real torchrun agent
- :mod:`elastic.testing.node`: one of them, and what can be done to it
- :mod:`elastic.testing.faults`: what can go wrong, as values
- :mod:`elastic.testing.ledger`: which samples took effect, on which lineage
- :mod:`elastic.testing.pacing`: how fast a script trains until its test is done with it
- :mod:`elastic.testing.processes`: every process of a test, by a token in its environment
- :mod:`elastic.testing.slowness`: how much slower than an idle one the machine is now
- :mod:`elastic.testing.waiting`: waiting for what must happen some day
"""
