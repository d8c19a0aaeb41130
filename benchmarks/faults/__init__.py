"""Runs that are disturbed on purpose and compared with undisturbed ones.

`python -m benchmarks.faults` runs them.
"""
