"""The script that the demo trains: examples/digits.py, which is part of the wheel."""
