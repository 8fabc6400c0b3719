"""A worker's connection to its agent: the worlds that the agent announces, and the worker's end.

Start with ``worlds``, which receives worlds and reports progress over :mod:`elastic.link`;
``received_world`` converts one for training; ``sigterm`` asks the agent what a SIGTERM means;
``node_first`` runs an operation in one worker of a node before the others.

May import link, world, hangs and stragglers, but nothing from the agent.
"""
