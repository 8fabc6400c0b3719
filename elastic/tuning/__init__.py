"""Options and intervals of a job, derived from a few numbers and checked against each other.

``agent_options`` are what users set, ``timeouts`` every interval with its formula, ``memory`` what
fits into a node's.
"""
