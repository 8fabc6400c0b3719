"""What agents and workers tell each other about a world, and how messages are read and written.

``world`` has the records: what identifies a world, what was agreed about it, and the ranks of one
worker in it. etcd's record, the link's message, the environment of a worker and the public
``World`` are made of these. ``typed_json`` turns JSON into typed records and back; ``environment``
holds the variables that a worker is started with.

May import secure_channel's strict JSON and the errors: both agents and workers load it.
"""
