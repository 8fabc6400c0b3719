"""An agent's supervision of its workers: their state, failures, deaths and hangs.

Start with ``supervisor``, through which the node's thread uses the others: ``workers`` are the
links to them in in-process mode (``known_workers`` their reported state, ``announced_worlds`` the
worlds that they were sent, ``worker_deaths`` the causes of their ends), ``failure_reporter``
publishes their failure reports, ``hangs`` publishes their state while no step completes and
executes verdicts.

May import :mod:`elastic.hangs`, :mod:`elastic.link` and the records, but neither the node's loop
nor torch.
"""
