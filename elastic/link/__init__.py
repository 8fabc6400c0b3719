"""The link between an agent and its workers: one unix socket per node, JSON messages.

Start with ``protocol``, which defines the messages; ``handshake`` exchanges the first ones.
``server`` is the agent's end: one thread. ``client`` is the worker's end: one thread that also
watches the agent's process.

May import secure_channel, telemetry and hangs, but nothing from the agent: workers load it.
"""
