"""From one world to the next without a restart, or from a checkpoint after one.

``changes`` decides when, ``reconfiguration`` agrees and rebuilds (``agreement``), ``transfer``
moves state between ranks, ``restore`` loads a checkpoint.
"""
