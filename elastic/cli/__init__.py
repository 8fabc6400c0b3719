"""The ``elastic`` command. ``main`` finds the subcommand and imports it, and nothing else.

:mod:`elastic.cli.launch` is ``elastic run``, :mod:`elastic.cli.demo` the demo,
:mod:`elastic.cli.kube` the manifests; ``checkpoints``, ``finish`` (with ``scale``) and
``completion`` are one file each.
"""
