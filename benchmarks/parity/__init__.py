"""Comparison of every layout with one process; `python -m benchmarks.parity` runs it."""
