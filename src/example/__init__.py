"""A complete model, plan, data module and task of experiment=example.

`make new NAME=moons` copies this folder to src/moons/, and its configs and a test beside ours.
"""
