"""Training speed of a bare loop, of ours and of alternatives.

`python -m benchmarks` measures them.
"""
