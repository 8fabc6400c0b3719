"""Test doubles: a storage that fails at a chosen call, and one in memory that can lose power.

For the tests of this package and of programs that use it; nothing else in this package imports it.
May import: :mod:`checkpoints.storage`. Start reading at :mod:`checkpoints.testing.faults`.
"""
