"""What a failure means for the job: restart, exclude the node, or stop.

Start with ``verdict``; the patterns that it looks for are the table in ``rules``. Both are pure and
import nothing of ``elastic``. ``kernel_log`` reads what else may explain a failure. Tests run the
verdict on a corpus of real error texts with labels (``tests/data/failure_corpus.json``).
"""
