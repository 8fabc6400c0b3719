"""Checks that read the source of the script's functions, up to the call of run.retry.

``counted_epochs`` finds loops that would count from 0 again, ``copied_weights`` reference models,
``local_state`` and ``local_decays`` variables: all are made anew when run.retry calls its function
again. Start with ``counted_epochs``. A function whose source is unknown passes.
"""
