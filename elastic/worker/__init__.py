"""A worker's connection to its agent: the worlds that it announces, and how the worker ends.

Start with ``worlds``, which receives worlds and reports progress over :mod:`elastic.link`;
``received_world`` converts one for training; ``sigterm`` asks the agent what a SIGTERM means;
``node_first`` runs an operation in one worker of a node before the others.

May import link, world, hangs and stragglers, but nothing of the agent.
"""
