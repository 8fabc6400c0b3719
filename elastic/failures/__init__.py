"""Decides the consequence of a failure for the job: restart, exclude the node, or stop.

Start with ``verdict``; its patterns are the table in ``rules``. Both are pure and import nothing
else from ``elastic``. ``kernel_log`` reads the kernel's log, which may explain a failure. Tests
apply the verdict to a corpus of labelled real error texts (``tests/data/failure_corpus.json``).
"""
