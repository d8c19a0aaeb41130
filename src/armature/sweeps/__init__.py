"""Sweeps: the search with Optuna, and the table and report of every sweep. Torch-free."""
