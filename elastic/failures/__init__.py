"""What a failure means for the job: restart, exclude the node, or stop. Pure.

Start with ``verdict``; the patterns that it looks for are the table in ``rules``. Imports nothing
of ``elastic``. Tests run it on a corpus of real error texts with labels
(``tests/data/failure_corpus.json``).
"""
