"""The kill-test kit, public: hurt a real job on one machine and prove that nothing was lost.

- :mod:`elastic.testing.cluster`: nodes of a job, each a real torchrun agent
- :mod:`elastic.testing.node`: one of them, and what can be done to it
- :mod:`elastic.testing.faults`: what can go wrong, as values
- :mod:`elastic.testing.ledger`: which samples took effect, on which lineage
- :mod:`elastic.testing.processes`: every process of a test, by a token in its environment
"""
