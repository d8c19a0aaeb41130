"""Optimisers, their parameter groups and their schedules."""
