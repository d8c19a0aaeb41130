"""Meshes and process groups: how a model and its gradients are spread over ranks, and nothing about files.

Strategies apply this package to a model as its plan says. Besides `armature.parallel` itself, only
`armature.strategies`, `checkpoint`, `launcher`, `training`, the launch and the worker import it, and validation imports
its torch-free modules. Models, tasks, data and callbacks never do: they ask the strategy.
"""
