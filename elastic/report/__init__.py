"""The report of a run: facts, charts, and one HTML page.

Start with ``model``: it creates a :class:`~elastic.report.model.RunReport` from a run's journals.
It is pure, like its parts: ``timeline`` (a lane per node), ``curves`` (values logged by the
script), ``incidents``, ``saved_checkpoints`` and ``verdicts``. ``charts`` draws them as SVG with
matplotlib, imported at the first chart; ``svg`` makes that SVG accessible and adapts it to the
reader's light or dark theme, whose colours are in ``palette``. ``page`` writes all of it into one
file. Of ``elastic`` it may import telemetry and the packages below that.
"""
