"""The report of a run: what happened in it, as facts, as charts, and as one HTML page.

``model`` makes a :class:`~elastic.report.model.RunReport` of a run's journals. It is pure, like the
parts that it consists of: ``timeline`` (a lane per node), ``curves`` (what the script has
measured), ``incidents``, ``saved_checkpoints`` and ``verdicts``. ``charts`` draws them as SVG with
matplotlib, imported at the first chart; ``svg`` makes that SVG accessible and follows the
reader's light or dark theme, whose colours are in ``palette``. ``page`` puts all of it into one
file. Start with ``model``. Of ``elastic`` it imports telemetry, and what is below that.
"""
