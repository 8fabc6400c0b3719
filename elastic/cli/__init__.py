"""The ``elastic`` command.

Start with ``main``, which finds the subcommand and imports only that.
:mod:`elastic.cli.launch` is ``elastic run``, :mod:`elastic.cli.demo` the demo,
:mod:`elastic.cli.kube` the manifests; every other command is one file. ``command_parser`` is the
parser of all of them, ``job_arguments`` the flags that name a job and its etcd.
"""
