"""What an agent knows of its workers, and what it does about them.

Start with ``supervisor``, through which the node's thread reaches the others: ``workers`` are the
links to them in in-process mode (``known_workers`` what they have said of themselves,
``announced_worlds`` the worlds that they were sent, ``worker_deaths`` what their ends mean),
``failure_reporter`` publishes what they accuse, ``hangs`` publishes what they show while no step
completes and carries verdicts out.

Imports :mod:`elastic.hangs`, :mod:`elastic.link` and the records, never the node's loop or torch.
"""
