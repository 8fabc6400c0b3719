"""Elastic, fault-tolerant training: see README.md."""
