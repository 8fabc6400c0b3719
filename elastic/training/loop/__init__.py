"""The loops of a script: epochs, steps, and commits.

Start with ``loops``, over which a script iterates. ``step_loop`` begins and ends steps,
``boundary`` saves or leaves between two of them, ``commits`` decides when a step has taken effect,
and ``follower`` reads a second loader within the steps of the first. ``callbacks`` are called after
steps, ``consumers`` finds the consumer of an iterator, and ``scope`` tracks the part of the API
that the script is in.

May import ``recovery`` and everything below it, but neither ``attempts`` nor ``run``.
"""
