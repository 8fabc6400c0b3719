"""Ranks that have no gradients of a module, or of a parameter, which others have.

All ranks reduce the same modules in the same order, or all of them raise an error: start with
``order``. Single parameters are zeros where they are missing: ``uncertain``.

May import the process group, the control flags and ``sharding``, and nothing else of training.
"""
