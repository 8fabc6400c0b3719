"""The dashboard's data. Start with ``job_feed``, which watches a job and produces ``snapshot``s.

``journal_feed`` follows the journals, ``event_log`` turns events into lines,
``charts`` draws charts with :mod:`elastic.report`. Nothing here depends on HTTP.
"""
