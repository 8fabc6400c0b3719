"""A worker's connection to its agent: the worlds that it announces, and how the worker ends.

``worlds`` receives worlds and reports progress over :mod:`elastic.link`;
``received_world`` turns one into what training needs; ``sigterm`` asks the node what SIGTERM means;
``node_first`` lets one worker of a node go first.
"""
