"""What tests need and users do not: test doubles, an emulated network, several ranks on one GPU.

The doubles pass the same contract tests as the real implementations: ``memory_store`` is a store
without etcd, ``nccl_semantics`` a c10d backend with NCCL's semantics on CPU tensors,
``manual_clock`` a clock that a test advances. The kill-test kit that users have, too, is
:mod:`elastic.testing`.

``tests`` is on ``PYTHONPATH`` for everything that tests start (``tests/conftest.py``).
"""
