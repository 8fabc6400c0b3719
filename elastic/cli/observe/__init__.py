"""Commands that look at a job and change nothing: ``elastic events`` and its kin.

``printable`` is what everything goes through that others have written: names, reasons, tracebacks.
They read journals (elastic/telemetry) and import neither torch nor, for journals alone, grpc.
"""
