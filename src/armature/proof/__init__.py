"""Prove that an experiment keeps its result: two runs compared, and where they part first.

`scripts/prove.py` is the command. `compare` reads two run directories. `locate` finds the first
place at which two runs differ that `callbacks/trace.py` has recorded.
"""
