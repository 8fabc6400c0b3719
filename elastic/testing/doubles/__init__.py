"""Test doubles, which pass the same contract tests as the real implementations.

``memory_store`` is a store without etcd, ``nccl_semantics`` a c10d backend with NCCL's semantics
on CPU tensors, ``manual_clock`` a clock that a test advances.
"""
