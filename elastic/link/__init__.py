"""The link between an agent and its workers: one unix socket per node, JSON messages.

``protocol`` has the messages, ``handshake`` the first of them; ``server`` is the agent's end, one
thread, ``client`` the worker's, one thread that also watches the agent's process.

Imports secure_channel and telemetry only: workers load it.
"""
