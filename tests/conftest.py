"""Fixtures that several rooms of tests share, each in a file named by its concept."""

pytest_plugins = ["etcd_fixtures"]
