"""Metrics of one node for Prometheus, OpenTelemetry, and TorchElastic's own handlers.

Start with ``table``, which lists every metric; docs/metrics.md is generated from it. ``counting``
turns events into counts, ``readings`` reads a node's state at the time of a scrape, ``series``
combines both; ``page`` renders that with prometheus-client, ``otlp`` sends it to a collector with
OpenTelemetry's SDK, and ``torchelastic`` passes them to the handlers that a program has configured
with torch. Only ``page`` and ``otlp`` need their packages, and only ``torchelastic`` needs torch.
May import node and the packages below it.
"""
