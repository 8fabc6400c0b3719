"""Metrics of one node for Prometheus, OpenTelemetry, and TorchElastic's own handlers.

``table`` lists every metric; docs/metrics.md is generated from it. ``counting`` turns events into
counts, ``readings`` reads what a node is doing at the time of a scrape, ``series`` puts both
together; ``page`` renders that with prometheus-client, ``otlp`` sends it to a collector with
OpenTelemetry's SDK, and ``torchelastic`` passes them to the handlers that a program has configured
with torch. Only ``page`` and ``otlp`` need their packages, and only ``torchelastic`` needs torch.
"""
