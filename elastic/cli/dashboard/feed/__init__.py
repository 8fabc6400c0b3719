"""What the dashboard knows of a job: ``job_feed`` watches it and makes ``snapshot``s.

``journal_feed`` reads the journals while they grow, ``event_log`` makes lines of what happens,
``charts`` has it drawn by :mod:`elastic.report`. Nothing here knows of HTTP.
"""
