"""Meshes and process groups: how a model and its gradients are spread over ranks, and nothing about
files.

Models, tasks, data and callbacks never import it: they ask the strategy. Validation imports its
torch-free modules.
"""
