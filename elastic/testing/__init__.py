"""The kill-test kit, public: inject faults into a real job on one machine and verify the result.

- :mod:`elastic.testing.cluster`: nodes of a job, each a real torchrun agent (start here)
- :mod:`elastic.testing.node`: one node, and the faults that can be injected into it
- :mod:`elastic.testing.faults`: faults as values
- :mod:`elastic.testing.ledger`: which samples took effect, on which lineage
- :mod:`elastic.testing.pacing`: the speed of a script until its test has injected all faults
- :mod:`elastic.testing.processes`: every process of a test, by a token in its environment
- :mod:`elastic.testing.slowness`: how much slower the machine is than an idle one
- :mod:`elastic.testing.waiting`: waiting for conditions with deadlines
"""
