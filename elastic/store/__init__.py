"""The key-value store of a job: etcd, or memory in tests, behind ``keyvalue``."""
