"""The records of a world that agents and workers exchange, and their encoding as JSON.

Start with ``world``, which has the records: the identity of a world, its agreed properties, and the
ranks of one worker in it. The record in etcd, the link's message, a worker's environment and the
public ``World`` consist of these. ``typed_json`` converts between JSON and typed records;
``environment`` defines the environment variables of a worker.

May import secure_channel's strict JSON and the errors: both agents and workers load it.
"""
