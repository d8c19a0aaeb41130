"""All checks that are made before a process starts; their problems are reported together.

Imports no torch.
"""
