"""The records of a world that agents and workers exchange, and their JSON encoding.

Start with ``world``, which has the records: the identity of a world, its agreed properties, and the
ranks of one worker in it. etcd's record, the link's message, the environment of a worker and the
public ``World`` consist of these. ``typed_json`` decodes JSON into typed records and encodes them;
``environment`` holds the variables that a worker is started with.

May import secure_channel's strict JSON and the errors: both agents and workers load it.
"""
