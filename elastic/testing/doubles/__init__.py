"""Test doubles: they behave as the real thing, and pass the same contract tests.

``memory_store`` is the store without etcd, ``nccl_semantics`` a c10d backend with NCCL's semantics
on CPU tensors, ``manual_clock`` time that moves when it is told to.
"""
