"""A complete model, plan, data module and task to copy and change.

Copy this folder to src/<your package>/ and the files configs/*/example.yaml, then name your package in `_target_`.
"""
